#include "ptx/body.h"

#include <optional>
#include <utility>

#include "ptx/declaration.h"

namespace cuda_on_cpu::ptx {
namespace {

bool is_register_space(const Variable& variable) {
  return variable.space == Space::kRegister;
}

// "%r12" is "%r" and 12.
std::pair<std::string_view, std::size_t> split_number(std::string_view name) {
  std::size_t digits = name.size();
  while (digits > 0 && name[digits - 1] >= '0' && name[digits - 1] <= '9') --digits;
  std::size_t number = 0;
  if (name.size() - digits > 9) return {name, 0};
  for (const char c : name.substr(digits)) number = number * 10 + static_cast<std::size_t>(c - '0');
  return {name.substr(0, digits), number};
}

class Body {
 public:
  Body(Reader& reader, const ModuleNames& names, Function& function)
      : reader_(reader), names_(names), function_(function) {}

  void read() {
    open_scope();
    declare_parameters();
    reader_.expect('{');
    for (std::size_t depth = 1; depth > 0;) {
      if (reader_.take_if('{')) {
        open_scope();
        ++depth;
      } else if (reader_.take_if('}')) {
        close_scope();
        --depth;
      } else {
        read_statement();
      }
    }
  }

 private:
  struct Range {
    std::size_t first = 0, count = 0;
  };
  struct Reference {  // to a label: of an instruction's operand or of a table
    bool of_table = false;
    std::size_t index = 0, part = 0;
    std::string label;
    std::uint32_t line = 0;
  };
  struct Scope {
    std::map<std::string, Range, std::less<>> ranges;  // "%r<5>" by "%r"
    std::map<std::string, std::size_t, std::less<>> registers, variables, labels, tables;
    std::vector<Reference> references;
  };

  void open_scope() { scopes_.emplace_back(); }

  void close_scope() {
    Scope scope = std::move(scopes_.back());
    scopes_.pop_back();
    for (Reference& reference : scope.references) {
      const auto label = scope.labels.find(reference.label);
      if (label != scope.labels.end()) {
        resolve(reference, label->second);
      } else if (scopes_.empty()) {
        throw SyntaxError(reader_.name() + ", line " + std::to_string(reference.line) +
                          ": no label '" + reference.label + "'");
      } else {
        scopes_.back().references.push_back(std::move(reference));
      }
    }
  }

  void resolve(const Reference& reference, std::size_t target) {
    if (reference.of_table) {
      function_.tables[reference.index][reference.part] = target;
    } else {
      Operand& operand = function_.instructions[reference.index].operands[reference.part];
      operand.value = static_cast<std::int64_t>(target);
    }
  }

  void declare_parameters() {
    for (const auto* list : {&function_.parameters, &function_.results}) {
      for (const Variable& variable : *list) {
        if (is_register_space(variable)) {
          scopes_.back().registers[variable.name] = function_.registers.size();
          function_.registers.push_back(variable.type);
        } else {
          scopes_.back().variables[variable.name] = function_.variables.size();
          function_.variables.push_back(variable);
        }
      }
    }
  }

  void read_statement() {
    const Token& token = reader_.peek();
    if (token.kind == Token::Kind::kEnd) reader_.fail("a function without its '}'");
    if (token.kind == Token::Kind::kDotted) {
      read_directive();
    } else if (token.kind == Token::Kind::kWord && reader_.peek(1).is(':')) {
      read_label();
    } else if (!reader_.take_if(';')) {
      read_instruction();
    }
  }

  void read_directive() {
    const Token token = reader_.take();
    if (token.text == "loc") {
      read_location(token.line);
      return;
    }
    if (token.text == "pragma") {
      reader_.skip_statement();
      return;
    }
    if (token.text == "extern" && reader_.peek().is_dotted("shared")) {
      reader_.take();
      declare(Space::kShared, true);
      return;
    }
    const std::optional<Space> space = space_named(token.text);
    if (!space) {
      throw SyntaxError(reader_.name() + ", line " + std::to_string(token.line) +
                        ": the directive ." + std::string(token.text) + " is not supported");
    }
    if (*space == Space::kRegister) {
      read_registers();
    } else {
      declare(*space, false);
    }
  }

  void read_location(std::uint32_t line) {
    source_file_ = static_cast<std::uint32_t>(reader_.expect_integer("a file number"));
    source_line_ = static_cast<std::uint32_t>(reader_.expect_integer("a line number"));
    while (reader_.peek().line == line && !reader_.at_end()) reader_.take();
  }

  void declare(Space space, bool external) {
    Variable variable = read_variable(reader_, space);
    reader_.expect(';');
    variable.external = external;
    scopes_.back().variables[variable.name] = function_.variables.size();
    function_.variables.push_back(std::move(variable));
  }

  void read_registers() {
    const Type type = type_named(reader_.peek().text);
    if (type == Type::kNone) reader_.fail("expected the type of registers");
    reader_.take();
    do {
      const std::string name(reader_.expect_word("a register"));
      std::size_t count = 1;
      if (reader_.take_if('<')) {
        count = static_cast<std::size_t>(reader_.expect_integer("a number of registers"));
        reader_.expect('>');
        scopes_.back().ranges[name] = {function_.registers.size(), count};
      } else {
        scopes_.back().registers[name] = function_.registers.size();
      }
      constexpr std::size_t kMost = 1'000'000;
      if (count > kMost || function_.registers.size() > kMost) reader_.fail("too many registers");
      function_.registers.insert(function_.registers.end(), count, type);
    } while (reader_.take_if(','));
    reader_.expect(';');
  }

  void read_label() {
    const std::string name(reader_.take().text);
    reader_.expect(':');
    if (reader_.take_if_dotted("branchtargets")) {
      read_table(name);
    } else if (reader_.peek().is_dotted("callprototype")) {
      reader_.skip_statement();
    } else if (!scopes_.back().labels.emplace(name, function_.instructions.size()).second) {
      reader_.fail("the label '" + name + "' stands twice");
    }
  }

  void read_table(const std::string& name) {
    const std::size_t index = function_.tables.size();
    std::vector<std::size_t> targets;
    do {
      const std::uint32_t line = reader_.peek().line;
      std::string label(reader_.expect_word("a label"));
      scopes_.back().references.push_back({true, index, targets.size(), std::move(label), line});
      targets.push_back(0);
    } while (reader_.take_if(','));
    reader_.expect(';');
    scopes_.back().tables[name] = index;
    function_.tables.push_back(std::move(targets));
  }

  void read_instruction() {
    Instruction instruction;
    const std::size_t begin = reader_.peek().begin;
    instruction.line = reader_.peek().line;
    instruction.source_file = source_file_;
    instruction.source_line = source_line_;
    if (reader_.take_if('@')) read_guard(instruction);
    instruction.opcode = reader_.expect_word("an instruction");
    while (reader_.peek().kind == Token::Kind::kDotted) {
      instruction.modifiers.emplace_back(reader_.take().text);
    }
    while (!reader_.peek().is(';')) {
      if (!instruction.operands.empty()) reader_.expect(',');
      instruction.operands.push_back(read_operand(instruction));
    }
    instruction.text = reader_.text(begin, reader_.peek().begin);
    for (char& c : instruction.text) c = c == '\t' || c == '\n' ? ' ' : c;
    reader_.expect(';');
    function_.instructions.push_back(std::move(instruction));
  }

  void read_guard(Instruction& instruction) {
    instruction.guarded = true;
    instruction.guard_negated = reader_.take_if('!');
    const std::optional<std::size_t> found = find_register(reader_.peek().text);
    if (!found || function_.registers[*found] != Type::kPred) {
      reader_.fail("expected a predicate register");
    }
    reader_.take();
    instruction.guard = *found;
  }

  Operand read_operand(const Instruction& instruction) {
    Operand operand = read_simple(instruction);
    if (!reader_.take_if('|')) return operand;
    Operand pair;
    pair.kind = Operand::Kind::kPair;
    pair.parts.push_back(std::move(operand));
    pair.parts.push_back(read_simple(instruction));
    return pair;
  }

  Operand read_simple(const Instruction& instruction) {
    Operand operand;
    if (reader_.take_if('{')) return read_list('}', Operand::Kind::kVector, instruction);
    if (reader_.take_if('(')) return read_list(')', Operand::Kind::kList, instruction);
    if (reader_.take_if('[')) return read_address(instruction);
    operand.negated = reader_.take_if('!');
    if (reader_.peek().kind == Token::Kind::kWord) return read_name(operand, instruction);
    return read_number(operand);
  }

  Operand read_list(char close, Operand::Kind kind, const Instruction& instruction) {
    Operand operand;
    operand.kind = kind;
    while (!reader_.take_if(close)) {
      if (!operand.parts.empty()) reader_.expect(',');
      operand.parts.push_back(read_simple(instruction));
    }
    return operand;
  }

  Operand read_address(const Instruction& instruction) {
    Operand operand;
    operand.kind = Operand::Kind::kAddress;
    Operand base = read_simple(instruction);
    using Kind = Operand::Kind;
    if (base.kind != Kind::kRegister && base.kind != Kind::kSymbol && base.kind != Kind::kInteger) {
      reader_.fail("expected an address");
    }
    operand.value = std::exchange(base.value, base.kind == Kind::kInteger ? base.value : 0);
    if (base.kind == Kind::kInteger) operand.value = 0;
    if (reader_.peek().is('+') || reader_.peek().is('-')) {
      operand.value += reader_.expect_integer("an offset");
    }
    operand.parts.push_back(std::move(base));
    reader_.expect(']');
    return operand;
  }

  Operand read_number(Operand operand) {
    std::uint64_t bits = 0;
    const bool negative = reader_.peek().is('-');
    if (float_literal(reader_.peek(negative ? 1 : 0).text, &bits, &operand.bits)) {
      if (negative) {
        reader_.take();
        bits ^= std::uint64_t{1} << (operand.bits - 1);
      }
      reader_.take();
      operand.kind = Operand::Kind::kFloat;
      operand.value = static_cast<std::int64_t>(bits);
    } else {
      operand.kind = Operand::Kind::kInteger;
      operand.value = reader_.expect_integer("an operand");
    }
    return operand;
  }

  Operand read_name(Operand operand, const Instruction& instruction) {
    const Token token = reader_.take();
    operand.name = token.text;
    using Kind = Operand::Kind;
    if (token.text == "_") return operand;
    if (const auto found = find_register(token.text)) {
      operand.kind = Kind::kRegister;
      operand.index = *found;
    } else if (token.text[0] == '%' || token.text == "WARP_SZ") {
      operand.kind = Kind::kSpecial;
      if (reader_.peek().kind == Token::Kind::kDotted && reader_.peek().begin == token.end) {
        operand.name += "." + std::string(reader_.take().text);
      }
    } else if (const auto local = find(&Scope::variables, token.text)) {
      operand.kind = Kind::kSymbol;
      operand.index = *local;
    } else if (const auto table = find(&Scope::tables, token.text)) {
      operand.kind = Kind::kTable;
      operand.index = *table;
    } else if (instruction.opcode == "bra") {
      operand.kind = Kind::kLabel;
      scopes_.back().references.push_back({false, function_.instructions.size(),
                                           instruction.operands.size(), operand.name, token.line});
    } else if (const auto global = names_.variables.find(token.text);
               global != names_.variables.end()) {
      operand.kind = Kind::kSymbol;
      operand.is_global = true;
      operand.index = global->second;
    } else if (names_.functions.contains(token.text) || instruction.opcode == "call") {
      operand.kind = Kind::kFunction;
    } else {
      throw SyntaxError(reader_.name() + ", line " + std::to_string(token.line) +
                        ": unknown name '" + operand.name + "'");
    }
    if (operand.kind == Kind::kSymbol && (reader_.peek().is('+') || reader_.peek().is('-'))) {
      operand.value = reader_.expect_integer("an offset");
    }
    return operand;
  }

  [[nodiscard]] std::optional<std::size_t> find_register(std::string_view name) const {
    const auto [prefix, number] = split_number(name);
    for (std::size_t i = scopes_.size(); i-- > 0;) {
      const auto found = scopes_[i].registers.find(name);
      if (found != scopes_[i].registers.end()) return found->second;
      const auto range = scopes_[i].ranges.find(prefix);
      if (range != scopes_[i].ranges.end() && prefix.size() < name.size() &&
          number < range->second.count) {
        return range->second.first + number;
      }
    }
    return std::nullopt;
  }

  [[nodiscard]] std::optional<std::size_t> find(
      std::map<std::string, std::size_t, std::less<>> Scope::*names, std::string_view name) const {
    for (std::size_t i = scopes_.size(); i-- > 0;) {
      const auto found = (scopes_[i].*names).find(name);
      if (found != (scopes_[i].*names).end()) return found->second;
    }
    return std::nullopt;
  }

  Reader& reader_;
  const ModuleNames& names_;
  Function& function_;
  std::vector<Scope> scopes_;
  std::uint32_t source_file_ = 0, source_line_ = 0;
};

}  // namespace

void read_body(Reader& reader, const ModuleNames& names, Function& function) {
  Body(reader, names, function).read();
}

}  // namespace cuda_on_cpu::ptx
