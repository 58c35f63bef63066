#include "ptx/declaration.h"

#include <bit>
#include <charconv>
#include <cstring>

namespace cuda_on_cpu::ptx {
namespace {

constexpr std::size_t kMostBytes = std::size_t{1} << 31;

void put(Variable& variable, std::size_t offset, std::uint64_t bits, std::size_t bytes,
         const Reader& reader) {
  if (offset + bytes > kMostBytes) reader.fail("an initialiser above 2 GiB");
  if (variable.initial.size() < offset + bytes) variable.initial.resize(offset + bytes);
  std::memcpy(variable.initial.data() + offset, &bits, bytes);
}

// Reads one value of an initialiser: a number, symbol, symbol+4 or generic(symbol)+4.
void read_value(Reader& reader, Variable& variable, std::size_t offset) {
  const std::size_t bytes = type_bytes(variable.type);
  const Token token = reader.peek();
  if (token.kind == Token::Kind::kWord) {
    Relocation relocation{offset, std::string(token.text), 0, false};
    reader.take();
    if (token.text == "generic" && reader.take_if('(')) {
      relocation.generic = true;
      relocation.symbol = reader.expect_word("a symbol");
      reader.expect(')');
    } else if (reader.peek().is('(')) {
      reader.fail("an operator in an initialiser other than generic()");
    }
    if (reader.peek().is('+') || reader.peek().is('-')) {
      relocation.addend = reader.expect_integer("an offset");
    }
    if (bytes != 8) reader.fail("an address in an element of another width than 64 bits");
    variable.relocations.push_back(relocation);
    put(variable, offset, 0, bytes, reader);
    return;
  }
  std::uint64_t bits = 0;
  int width = 0;
  const bool negative = token.is('-') && reader.take_if('-');
  if (float_literal(reader.peek().text, &bits, &width)) {
    reader.take();
    if (width == 64 && bytes == 4) {
      bits = std::bit_cast<std::uint32_t>(static_cast<float>(std::bit_cast<double>(bits)));
    }
    if (negative) bits ^= std::uint64_t{1} << (8 * bytes - 1);
  } else {
    bits = static_cast<std::uint64_t>(reader.expect_integer("a number or an address"));
    if (negative) bits = 0 - bits;
  }
  put(variable, offset, bits, bytes, reader);
}

// Reads "{...}" (nested as the dimensions are) or one value. `stride` is the bytes of the whole.
void read_initial(Reader& reader, Variable& variable, std::size_t offset,
                  const std::vector<std::size_t>& dimensions, std::size_t depth) {
  if (!reader.take_if('{')) {
    read_value(reader, variable, offset);
    return;
  }
  std::size_t stride = type_bytes(variable.type);
  for (std::size_t i = depth + 1; i < dimensions.size(); ++i) stride *= dimensions[i];
  for (std::size_t i = 0; !reader.take_if('}'); ++i) {
    if (i > 0) reader.expect(',');
    read_initial(reader, variable, offset + i * stride, dimensions, depth + 1);
  }
}

std::vector<std::size_t> read_dimensions(Reader& reader, Variable& variable) {
  std::vector<std::size_t> dimensions;
  while (reader.take_if('[')) {
    variable.is_array = true;
    std::size_t count = 0;
    if (!reader.peek().is(']')) {
      count = static_cast<std::size_t>(reader.expect_integer("a number of elements"));
    }
    reader.expect(']');
    if (count > kMostBytes || (count > 0 && variable.bytes > kMostBytes / count)) {
      reader.fail("a variable above 2 GiB");
    }
    variable.bytes *= count;
    dimensions.push_back(count);
  }
  return dimensions;
}

}  // namespace

std::optional<Space> space_named(std::string_view word) {
  if (word == "reg") return Space::kRegister;
  if (word == "global") return Space::kGlobal;
  if (word == "const") return Space::kConstant;
  if (word == "shared") return Space::kShared;
  if (word == "local") return Space::kLocal;
  if (word == "param") return Space::kParameter;
  return std::nullopt;
}

bool float_literal(std::string_view text, std::uint64_t* bits, int* width) {
  const auto hexadecimal = [&](std::size_t digits) {
    if (text.size() != digits + 2) return false;
    const char* end = text.data() + text.size();
    return std::from_chars(text.data() + 2, end, *bits, 16).ptr == end;
  };
  if (text.starts_with("0f") || text.starts_with("0F")) {
    *width = 32;
    return hexadecimal(8);
  }
  if (text.starts_with("0d") || text.starts_with("0D")) {
    *width = 64;
    return hexadecimal(16);
  }
  if (text.find('.') == std::string_view::npos || text.starts_with("0x")) return false;
  double value = 0;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
  *bits = std::bit_cast<std::uint64_t>(value);
  *width = 64;
  return result.ec == std::errc() && result.ptr == text.data() + text.size();
}

Variable read_variable(Reader& reader, Space space) {
  Variable variable;
  variable.space = space;
  std::size_t vector = 1;
  while (reader.peek().kind == Token::Kind::kDotted) {
    const std::string_view word = reader.peek().text;
    if (word == "align") {
      reader.take();
      variable.alignment = static_cast<std::size_t>(reader.expect_integer("an alignment"));
      continue;
    }
    if (word == "ptr") {  // of a kernel's parameter: what it points to says nothing to us
      reader.take();
      if (space_named(reader.peek().text)) reader.take();
      continue;
    }
    if (word == "v2" || word == "v4") {
      vector = word == "v2" ? 2 : 4;
    } else if (type_named(word) != Type::kNone) {
      variable.type = type_named(word);
    } else {
      reader.fail("an unsupported attribute of a variable");
    }
    reader.take();
  }
  if (variable.type == Type::kNone) reader.fail("expected the type of a variable");
  variable.bytes = type_bytes(variable.type) * vector;
  if (variable.bytes > variable.alignment) variable.alignment = variable.bytes;
  if ((variable.alignment & (variable.alignment - 1)) != 0 || variable.alignment > 4096) {
    reader.fail("an alignment that is no power of two up to 4096");
  }
  variable.name = reader.expect_word("a name");
  const std::vector<std::size_t> dimensions = read_dimensions(reader, variable);
  if (reader.take_if('=')) {
    read_initial(reader, variable, 0, dimensions, 0);
    if (variable.bytes == 0) variable.bytes = variable.initial.size();
    if (variable.initial.size() > variable.bytes) reader.fail("more values than elements");
    variable.initial.resize(variable.bytes);
  }
  return variable;
}

std::vector<Variable> read_parameters(Reader& reader) {
  std::vector<Variable> all;
  if (!reader.take_if('(')) return all;
  while (!reader.take_if(')')) {
    if (!all.empty()) reader.expect(',');
    if (reader.peek().is_word("_")) reader.fail("a parameter without a name");
    const std::optional<Space> space = space_named(reader.peek().text);
    if (!space || (*space != Space::kParameter && *space != Space::kRegister)) {
      reader.fail("expected .param or .reg");
    }
    reader.take();
    all.push_back(read_variable(reader, *space));
  }
  return all;
}

}  // namespace cuda_on_cpu::ptx
