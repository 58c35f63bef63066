#include "ptx/lexer.h"

#include <cctype>
#include <cstddef>

#include "ptx/ast.h"

namespace cuda_on_cpu::ptx {
namespace {

bool starts_word(char c) {
  return std::isalpha(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '$' || c == '%';
}

bool continues_word(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '$';
}

bool is_digit(char c) {
  return std::isdigit(static_cast<unsigned char>(c)) != 0;
}

class Lexer {
 public:
  Lexer(std::string_view text, const std::string& name) : text_(text), name_(name) {}

  std::vector<Token> run() {
    std::vector<Token> all;
    all.reserve(text_.size() / 4);
    while (skip_blank()) all.push_back(next());
    all.push_back({Token::Kind::kEnd, {}, line_, text_.size(), text_.size()});
    return all;
  }

 private:
  [[nodiscard]] char at(std::size_t i) const { return i < text_.size() ? text_[i] : '\0'; }

  // Returns whether something follows.
  bool skip_blank() {
    while (here_ < text_.size()) {
      const char c = text_[here_];
      if (c == '\n') {
        ++line_;
        ++here_;
      } else if (std::isspace(static_cast<unsigned char>(c)) != 0) {
        ++here_;
      } else if (c == '/' && at(here_ + 1) == '/') {
        while (here_ < text_.size() && text_[here_] != '\n') ++here_;
      } else if (c == '/' && at(here_ + 1) == '*') {
        skip_block_comment();
      } else {
        return true;
      }
    }
    return false;
  }

  void skip_block_comment() {
    const std::size_t close = text_.find("*/", here_ + 2);
    if (close == std::string_view::npos) fail("a comment that does not end");
    for (; here_ < close + 2; ++here_) line_ += text_[here_] == '\n';
  }

  Token next() {
    const char c = text_[here_];
    const std::size_t begin = here_;
    if (c == '"') return string();
    if (c == '.' && starts_word(at(here_ + 1))) {
      end_of_dotted();
      return token(Token::Kind::kDotted, begin + 1, here_, begin);
    }
    if (starts_word(c)) {
      ++here_;
      while (continues_word(at(here_))) ++here_;
      return token(Token::Kind::kWord, begin, here_, begin);
    }
    if (is_digit(c)) {
      while (continues_word(at(here_)) || (at(here_) == '.' && is_digit(at(here_ + 1)))) ++here_;
      return token(Token::Kind::kNumber, begin, here_, begin);
    }
    ++here_;
    return token(Token::Kind::kCharacter, begin, here_, begin);
  }

  void end_of_dotted() {
    ++here_;
    while (continues_word(at(here_)) || (at(here_) == ':' && at(here_ + 1) == ':')) {
      here_ += at(here_) == ':' ? std::size_t{2} : std::size_t{1};
    }
  }

  Token string() {
    const std::size_t begin = here_;
    const std::size_t close = text_.find('"', here_ + 1);
    if (close == std::string_view::npos) fail("a string that does not end");
    here_ = close + 1;
    return token(Token::Kind::kString, begin + 1, close, begin);
  }

  [[nodiscard]] Token token(Token::Kind kind, std::size_t from, std::size_t to,
                            std::size_t begin) const {
    return {kind, text_.substr(from, to - from), line_, begin, here_};
  }

  [[noreturn]] void fail(const std::string& what) const {
    throw SyntaxError(name_ + ", line " + std::to_string(line_) + ": " + what);
  }

  std::string_view text_;
  const std::string& name_;
  std::size_t here_ = 0;
  std::uint32_t line_ = 1;
};

}  // namespace

std::vector<Token> tokens(std::string_view text, const std::string& name) {
  return Lexer(text, name).run();
}

}  // namespace cuda_on_cpu::ptx
