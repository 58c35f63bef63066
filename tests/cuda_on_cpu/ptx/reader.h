// Walks over tokens, and says where it stands when something is wrong.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "ptx/ast.h"
#include "ptx/lexer.h"

namespace cuda_on_cpu::ptx {

class Reader {
 public:
  Reader(std::string_view text, const std::string& name)
      : text_(text), name_(name), tokens_(tokens(text, name)) {}

  [[nodiscard]] const Token& peek(std::size_t ahead = 0) const {
    const std::size_t i = here_ + ahead;
    return tokens_[i < tokens_.size() ? i : tokens_.size() - 1];
  }
  const Token& take() {
    const Token& token = peek();
    if (here_ + 1 < tokens_.size()) ++here_;
    return token;
  }
  [[nodiscard]] bool at_end() const { return peek().kind == Token::Kind::kEnd; }
  bool take_if(char c);
  bool take_if_dotted(std::string_view word);
  void expect(char c);
  std::string_view expect_word(std::string_view what);
  // An integer with an optional sign.
  std::int64_t expect_integer(std::string_view what);
  // Skips to the end of a statement, whatever stands in it; braces are matched.
  void skip_statement();
  // Skips "{ ... }", the first brace included.
  void skip_braces();

  [[nodiscard]] std::size_t position() const { return here_; }
  void rewind(std::size_t position) { here_ = position; }
  [[nodiscard]] std::string_view text(std::size_t begin, std::size_t end) const {
    return text_.substr(begin, end - begin);
  }
  [[nodiscard]] const std::string& name() const { return name_; }
  // Throws SyntaxError with the line of the next token and its text.
  [[noreturn]] void fail(const std::string& what) const;

 private:
  std::string_view text_;
  std::string name_;
  std::vector<Token> tokens_;
  std::size_t here_ = 0;
};

// The value of an integer literal (decimal, 0x, 0b, octal, suffix U); false if it is none or needs
// more than 64 bits.
[[nodiscard]] bool integer_literal(std::string_view text, std::int64_t* value);

// Shortens a line of text for a message.
[[nodiscard]] std::string shortened(std::string_view text);

}  // namespace cuda_on_cpu::ptx
