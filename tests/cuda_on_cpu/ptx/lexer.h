// PTX text as tokens.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace cuda_on_cpu::ptx {

struct Token {
  enum class Kind : std::uint8_t {
    kWord,       // identifier: add, %r1, $L__BB0_1, _
    kDotted,     // .global, .f32, .shared::cta; text is without the dot
    kNumber,     // 12, 0x1f, 0f3f800000, 1.5
    kString,     // text is without the quotes
    kCharacter,  // one character of punctuation
    kEnd,
  };
  Kind kind = Kind::kEnd;
  std::string_view text;
  std::uint32_t line = 0;  // from 1
  std::size_t begin = 0, end = 0;

  [[nodiscard]] bool is(char c) const { return kind == Kind::kCharacter && text[0] == c; }
  [[nodiscard]] bool is_word(std::string_view word) const {
    return kind == Kind::kWord && text == word;
  }
  [[nodiscard]] bool is_dotted(std::string_view word) const {
    return kind == Kind::kDotted && text == word;
  }
};

// Returns the tokens of `text` (which must live as long as they), the last one kEnd.
//
// Throws: SyntaxError for a character or a comment that is none
[[nodiscard]] std::vector<Token> tokens(std::string_view text, const std::string& name);

}  // namespace cuda_on_cpu::ptx
