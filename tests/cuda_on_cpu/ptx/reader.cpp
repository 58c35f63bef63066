#include "ptx/reader.h"

#include <algorithm>
#include <charconv>

namespace cuda_on_cpu::ptx {

bool Reader::take_if(char c) {
  if (!peek().is(c)) return false;
  take();
  return true;
}

bool Reader::take_if_dotted(std::string_view word) {
  if (!peek().is_dotted(word)) return false;
  take();
  return true;
}

void Reader::expect(char c) {
  if (!take_if(c)) fail(std::string("expected '") + c + "'");
}

std::string_view Reader::expect_word(std::string_view what) {
  if (peek().kind != Token::Kind::kWord) fail("expected " + std::string(what));
  return take().text;
}

std::int64_t Reader::expect_integer(std::string_view what) {
  bool negative = false;
  while (peek().is('-') || peek().is('+')) negative ^= take().is('-');
  std::int64_t value = 0;
  if (peek().kind != Token::Kind::kNumber || !integer_literal(peek().text, &value)) {
    fail("expected " + std::string(what));
  }
  take();
  return negative ? static_cast<std::int64_t>(0 - static_cast<std::uint64_t>(value)) : value;
}

void Reader::skip_statement() {
  while (!at_end() && !peek().is(';')) {
    if (peek().is('{')) {
      skip_braces();
    } else {
      take();
    }
  }
  expect(';');
}

void Reader::skip_braces() {
  expect('{');
  for (int depth = 1; depth > 0;) {
    if (at_end()) fail("a '{' without its '}'");
    const Token& token = take();
    depth += token.is('{') ? 1 : token.is('}') ? -1 : 0;
  }
}

void Reader::fail(const std::string& what) const {
  const Token& token = peek();
  std::string_view rest = text_.substr(std::min(token.begin, text_.size()));
  rest = rest.substr(0, rest.find('\n'));
  throw SyntaxError(name_ + ", line " + std::to_string(token.line) + ": " + what + ", found " +
                    (rest.empty() ? "the end" : "'" + shortened(rest) + "'"));
}

bool integer_literal(std::string_view text, std::int64_t* value) {
  int base = 10;
  if (text.ends_with('U') || text.ends_with('u')) text.remove_suffix(1);
  if (text.starts_with("0x") || text.starts_with("0X")) {
    base = 16;
    text.remove_prefix(2);
  } else if (text.starts_with("0b") || text.starts_with("0B")) {
    base = 2;
    text.remove_prefix(2);
  } else if (text.size() > 1 && text[0] == '0') {
    base = 8;
    text.remove_prefix(1);
  }
  std::uint64_t bits = 0;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), bits, base);
  *value = static_cast<std::int64_t>(bits);
  return result.ec == std::errc() && result.ptr == text.data() + text.size();
}

std::string shortened(std::string_view text) {
  constexpr std::size_t kMost = 160;
  return std::string(text.substr(0, kMost)) + (text.size() > kMost ? "..." : "");
}

}  // namespace cuda_on_cpu::ptx
