// PTX text as data: what stands in the file, names resolved, nothing interpreted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace cuda_on_cpu::ptx {

// Text that is no PTX, or PTX outside of what is parsed. The message names kernel, line and text.
class SyntaxError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

enum class Type : std::uint8_t {
  kNone,
  kPred,
  kB8,
  kU8,
  kS8,
  kB16,
  kU16,
  kS16,
  kB32,
  kU32,
  kS32,
  kB64,
  kU64,
  kS64,
  kB128,
  kF16,
  kBf16,
  kF32,
  kF64,
  kF16x2,
  kBf16x2,
};

enum class Space : std::uint8_t { kRegister, kGlobal, kConstant, kShared, kLocal, kParameter };

struct Operand {
  enum class Kind : std::uint8_t {
    kRegister,  // index in Function::registers
    kSpecial,   // name, with its suffix: "%tid.x", "%laneid", "WARP_SZ"
    kInteger,   // value
    kFloat,     // value holds the bits; bits is 32 or 64
    kSymbol,    // variable: index in Function::variables or, with is_global, in Module::variables;
                // value is what is added to its address
    kFunction,  // name; the target of a call
    kLabel,     // value: index of the instruction it stands before (may be one past the last)
    kTable,     // index in Function::tables
    kAddress,   // [parts[0] + value]; parts[0] is a register, a symbol (with value 0) or an integer
    kVector,    // {parts}
    kPair,      // parts[0]|parts[1]
    kList,      // (parts), of a call
    kSink,      // _
  };
  Kind kind = Kind::kSink;
  bool negated = false;  // !p
  bool is_global = false;
  int bits = 0;
  std::size_t index = 0;
  std::int64_t value = 0;
  std::string name;
  std::vector<Operand> parts;
};

struct Instruction {
  std::string opcode;                  // "ld"
  std::vector<std::string> modifiers;  // "global", "v4", "f32"; "shared::cta" is one
  std::vector<Operand> operands;
  bool guarded = false, guard_negated = false;     // @p, @!p
  std::size_t guard = 0;                           // register
  std::uint32_t line = 0;                          // of the PTX text, from 1
  std::uint32_t source_file = 0, source_line = 0;  // of the last .loc before it; 0: none
  std::string text;                                // as written, without the semicolon, trimmed
};

// A place in an initialiser that holds an address.
struct Relocation {
  std::size_t offset = 0;
  std::string symbol;
  std::int64_t addend = 0;
  bool generic = true;  // generic(symbol); else an address in the symbol's space
};

struct Variable {
  std::string name;
  Space space = Space::kGlobal;
  Type type = Type::kNone;  // of an element
  std::size_t alignment = 1, bytes = 0;
  bool is_array = false;
  bool external = false;           // .extern: of shared memory, the dynamic part
  std::vector<std::byte> initial;  // bytes of them, or none (zeros)
  std::vector<Relocation> relocations;
};

struct Function {
  std::string name;
  bool entry = false, defined = false;
  std::uint32_t line = 0;
  std::vector<Variable> parameters, results;  // of a .func also registers (Space::kRegister)
  std::vector<Type> registers;                // every scope's; the first are the parameters and
                                              // results that are registers, in that order
  // .param variables of this function (first the parameters and results that are no registers, in
  // that order), then .local, .shared and .param of every scope. Shared ones are one variable a
  // function, whichever scope.
  std::vector<Variable> variables;
  std::vector<Instruction> instructions;
  std::vector<std::vector<std::size_t>> tables;  // .branchtargets: instruction indices
  int max_threads = 0;                           // product of .maxntid or .reqntid; 0: not given
  bool exact_threads = false;                    // .reqntid
  std::string error;  // why the body was not parsed; instructions are then empty
};

struct Module {
  std::string version, target;                 // "9.0", "sm_80"
  std::map<std::uint32_t, std::string> files;  // of .file
  std::vector<Variable> variables;             // of module scope: global, constant, shared
  std::vector<Function> functions;             // definitions, and declarations without one
};

// Parses a module. Errors within the body of a function are left in Function::error; any other
// throws SyntaxError. `name` stands in messages.
[[nodiscard]] Module parse_module(std::string_view text, const std::string& name);

// "f32"; "" for kNone.
[[nodiscard]] std::string_view type_name(Type type);
// The type called so ("f32", without the dot), or kNone.
[[nodiscard]] Type type_named(std::string_view name);
// Bytes in memory; 0 for kNone and kPred.
[[nodiscard]] std::size_t type_bytes(Type type);

}  // namespace cuda_on_cpu::ptx
