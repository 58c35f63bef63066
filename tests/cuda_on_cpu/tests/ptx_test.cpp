#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ptx/ast.h"
#include "ptx/fat_binary.h"

namespace cuda_on_cpu::ptx {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

const std::string kHead = ".version 9.0\n.target sm_80, debug\n.address_size 64\n";

// A module of one kernel "k" with a parameter "p".
Module kernel(const std::string& body) {
  return parse_module(
      kHead + ".visible .entry k(.param .u64 .ptr .global .align 8 p)\n{\n" + body + "\n}\n",
      "test");
}

const Function& only_function(const Module& module) {
  EXPECT_EQ(module.functions.size(), 1U);
  EXPECT_EQ(module.functions.at(0).error, "");
  return module.functions.at(0);
}

std::string refusal(const std::string& text) {
  try {
    const Module module = parse_module(text, "test");
    for (const Function& function : module.functions) {
      if (!function.error.empty()) return function.error;
    }
  } catch (const SyntaxError& error) {
    return error.what();
  }
  return "accepted";
}

std::string refusal_of_body(const std::string& body) {
  return refusal(kHead + ".entry k()\n{\n" + body + "\n}\n");
}

TEST(Ptx, ReadsTheHeader) {
  const Module module = parse_module(kHead + ".file 3 \"a b.cu\", 123, 45\n", "test");
  EXPECT_EQ(module.version, "9.0");
  EXPECT_EQ(module.target, "sm_80");
  EXPECT_EQ(module.files.at(3), "a b.cu");
}

TEST(Ptx, SplitsAnInstruction) {
  const Module module = kernel(
      ".reg .pred %p<2>; .reg .b32 %r<3>; .reg .b64 %rd<2>;\n"
      ".loc 1 7 3, function_name $L__info_string0, inlined_at 1 4 30\n"
      "@!%p1 ld.global.nc.L2::128B.v2.u32 {%r1, %r2}, [%rd1+-16];");
  const Function& f = only_function(module);
  ASSERT_EQ(f.instructions.size(), 1U);
  const Instruction& i = f.instructions[0];
  EXPECT_EQ(i.opcode, "ld");
  EXPECT_THAT(i.modifiers, ElementsAre("global", "nc", "L2::128B", "v2", "u32"));
  EXPECT_TRUE(i.guarded && i.guard_negated);
  EXPECT_EQ(i.guard, 1U);
  EXPECT_EQ(i.line, 8U);
  EXPECT_EQ(i.source_file, 1U);
  EXPECT_EQ(i.source_line, 7U);
  EXPECT_EQ(i.text, "@!%p1 ld.global.nc.L2::128B.v2.u32 {%r1, %r2}, [%rd1+-16]");
  ASSERT_EQ(i.operands.size(), 2U);
  EXPECT_EQ(i.operands[0].kind, Operand::Kind::kVector);
  EXPECT_EQ(i.operands[0].parts.at(1).index, 4U);  // after 2 predicates and %r0, %r1
  EXPECT_EQ(i.operands[1].kind, Operand::Kind::kAddress);
  EXPECT_EQ(i.operands[1].value, -16);
  EXPECT_EQ(f.registers.at(i.operands[1].parts.at(0).index), Type::kB64);
}

TEST(Ptx, ReadsNumbersOfEveryKind) {
  const Module module = kernel(
      ".reg .b32 %r; .reg .f64 %d;\n"
      "mov.u32 %r, 0x1F; mov.u32 %r, 017; mov.u32 %r, 0b101U; mov.u32 %r, -9;\n"
      "mov.u32 %r, 18446744073709551615; mov.f32 %r, 0f3F800000; mov.f32 %r, -0f3F800000;\n"
      "mov.f64 %d, 0dC000000000000000; mov.f64 %d, 1.5;");
  std::vector<std::int64_t> values;
  for (const Instruction& i : only_function(module).instructions) {
    values.push_back(i.operands.at(1).value);
  }
  EXPECT_THAT(values,
              ElementsAre(31, 15, 5, -9, -1, 0x3F800000, 0xBF800000,
                          static_cast<std::int64_t>(0xC000000000000000), 0x3FF8000000000000));
}

TEST(Ptx, ResolvesLabelsInTheInnermostScopeThatHasThem) {
  const Module module = kernel(
      "A: bra B;\n"
      "{ B: bra A; { bra.uni B; } }\n"
      "B: ret;\n"
      "C:");
  const Function& f = only_function(module);
  EXPECT_EQ(f.instructions.at(0).operands.at(0).value, 3);  // the outer B
  EXPECT_EQ(f.instructions.at(1).operands.at(0).value, 0);
  EXPECT_EQ(f.instructions.at(2).operands.at(0).value, 1);  // the inner B
}

TEST(Ptx, ResolvesTablesOfBranches) {
  const Module module = kernel(
      ".reg .b32 %r;\n"
      "T: .branchtargets X, Y, X;\n"
      "brx.idx %r, T; X: ret; Y: exit;");
  const Function& f = only_function(module);
  EXPECT_THAT(f.tables.at(f.instructions.at(0).operands.at(1).index), ElementsAre(1, 2, 1));
}

TEST(Ptx, KeepsTheRegistersOfInnerScopesApart) {
  const Module module = kernel(
      ".reg .b32 t; mov.b32 t, 1; { .reg .f64 t; mov.f64 t, 0d0000000000000000; } mov.b32 t, 2;");
  const Function& f = only_function(module);
  EXPECT_EQ(f.instructions.at(0).operands.at(0).index, f.instructions.at(2).operands.at(0).index);
  EXPECT_EQ(f.registers.at(f.instructions.at(1).operands.at(0).index), Type::kF64);
}

TEST(Ptx, ReadsSpecialRegistersSymbolsAndSinks) {
  const Module module = parse_module(
      kHead +
          ".global .align 4 .b8 table[12];\n.extern .shared .align 16 .b8 s[];\n"
          ".entry k() { .reg .b32 %r; .reg .b64 %rd; .shared .align 8 .b8 own[16];\n"
          "mov.u32 %r, %ctaid.x; mov.u64 %rd, table+4; mov.u32 %r, own; mov.u32 %r, s;\n"
          "mov.u32 %r, WARP_SZ; atom.global.add.u32 _, [table+8], %r; }",
      "test");
  const Function& f = only_function(module);
  EXPECT_EQ(f.instructions.at(0).operands.at(1).name, "%ctaid.x");
  const Operand& table = f.instructions.at(1).operands.at(1);
  EXPECT_TRUE(table.kind == Operand::Kind::kSymbol && table.is_global && table.value == 4);
  EXPECT_FALSE(f.instructions.at(2).operands.at(1).is_global);
  EXPECT_TRUE(module.variables.at(f.instructions.at(3).operands.at(1).index).external);
  EXPECT_EQ(f.instructions.at(4).operands.at(1).kind, Operand::Kind::kSpecial);
  EXPECT_EQ(f.instructions.at(5).operands.at(0).kind, Operand::Kind::kSink);
  EXPECT_EQ(f.instructions.at(5).operands.at(1).value, 8);
}

TEST(Ptx, ReadsCalls) {
  const Module module =
      parse_module(kHead +
                       ".extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);\n"
                       ".func f(.param .b32 x) { ret; }\n"
                       ".entry k() { { .param .b64 p0; .param .b64 p1; .param .b32 q;\n"
                       "call.uni (q), vprintf, (p0, p1); } { .param .b32 z; call f, (z); } }",
                   "test");
  ASSERT_EQ(module.functions.size(), 3U);
  EXPECT_FALSE(module.functions[0].defined);
  EXPECT_TRUE(module.functions[1].defined);
  const Function& k = module.functions[2];
  EXPECT_EQ(k.error, "");
  EXPECT_EQ(k.instructions.at(0).operands.at(1).name, "vprintf");
  EXPECT_EQ(k.instructions.at(0).operands.at(2).parts.size(), 2U);
  EXPECT_EQ(k.instructions.at(1).operands.at(0).kind, Operand::Kind::kFunction);
}

TEST(Ptx, LaysOutInitialValues) {
  const Module module = parse_module(kHead +
                                         ".global .align 4 .u32 a[2][3] = {{1, 2}, {4}};\n"
                                         ".const .align 8 .f32 b = 0f40000000;\n"
                                         ".global .align 8 .u64 c[3] = {7, generic(a)+8, a};\n"
                                         ".global .b8 text[] = {104, 105, 0};\n",
                                     "test");
  std::vector<std::uint32_t> a(6);
  ASSERT_EQ(module.variables.at(0).initial.size(), 24U);
  std::memcpy(a.data(), module.variables[0].initial.data(), 24);
  EXPECT_THAT(a, ElementsAre(1, 2, 0, 4, 0, 0));
  float b = 0;
  std::memcpy(&b, module.variables.at(1).initial.data(), 4);
  EXPECT_EQ(b, 2.0F);
  const Variable& c = module.variables.at(2);
  ASSERT_EQ(c.relocations.size(), 2U);
  EXPECT_TRUE(c.relocations[0].generic && !c.relocations[1].generic);
  EXPECT_EQ(c.relocations[0].offset, 8U);
  EXPECT_EQ(c.relocations[0].addend, 8);
  EXPECT_EQ(module.variables.at(3).bytes, 3U);
}

TEST(Ptx, ReadsLaunchBounds) {
  const Module module = parse_module(
      kHead + ".entry a() .maxntid 128, 2, 1 .minnctapersm 2 { ret; }\n.entry b() .reqntid 96 {}",
      "test");
  EXPECT_EQ(module.functions.at(0).max_threads, 256);
  EXPECT_FALSE(module.functions[0].exact_threads);
  EXPECT_EQ(module.functions.at(1).max_threads, 96);
  EXPECT_TRUE(module.functions[1].exact_threads);
}

TEST(Ptx, NamesLineAndTextOfWhatItDoesNotKnow) {
  EXPECT_EQ(refusal_of_body(".reg .b32 a;\nmov.u32 a, ]x;"),
            "test, line 7: expected an operand, found ']x;'");
}

TEST(Ptx, RefusesWhatIsNoPtx) {
  EXPECT_THAT(refusal(""), HasSubstr("expected .version"));
  EXPECT_THAT(refusal("ELF"), HasSubstr("expected a directive, found 'ELF'"));
  EXPECT_THAT(refusal(kHead + ".entry k() {"), HasSubstr("a '{' without its '}'"));
  EXPECT_THAT(refusal(kHead + "/* never ends"), HasSubstr("a comment that does not end"));
  EXPECT_THAT(refusal(kHead + ".address_size 32"), HasSubstr("expected .address_size 64"));
  EXPECT_THAT(refusal(kHead + ".tex .u64 t;"), HasSubstr("the directive is not supported"));
  EXPECT_THAT(refusal(kHead + ".entry k() .reqnctapercluster 2 {}"),
              HasSubstr(".reqnctapercluster is not supported"));
  EXPECT_THAT(refusal(kHead + ".global .u32 a[999999999];"), HasSubstr("above 2 GiB"));
  EXPECT_THAT(refusal(kHead + ".global .u8 a[2] = {1, 2, 3};"), HasSubstr("more values than"));
  EXPECT_THAT(refusal_of_body("bra nowhere;"), HasSubstr("line 6: no label 'nowhere'"));
  EXPECT_THAT(refusal_of_body("A: A: ret;"), HasSubstr("the label 'A' stands twice"));
  EXPECT_THAT(refusal_of_body(".reg .b32 %r<9999999>;"), HasSubstr("too many registers"));
  EXPECT_THAT(refusal_of_body(".reg .b32 a; add.s32 a, a, b;"), HasSubstr("unknown name 'b'"));
  EXPECT_THAT(refusal_of_body(".reg .b32 a; @a ret;"), HasSubstr("a predicate register"));
}

// Every prefix of a module is a module or an error, and never a crash or a hang.
TEST(Ptx, SurvivesBeingCutOffAnywhere) {
  const std::string whole =
      kHead +
      ".file 1 \"x.cu\"\n.global .align 4 .u32 a[2] = {1, 2};\n.func (.param .b32 r) f(.param .b32 "
      "x)"
      "{ ret; }\n.entry k(.param .u64 p) .maxntid 32 { .reg .pred %p<3>; .reg .b32 %r<4>;\n"
      ".loc 1 2 3\nL: @%p1 add.s32 %r1, %r2, -3; T: .branchtargets L, L; brx.idx %r1, T;\n"
      "{ .param .b32 q; call (q), f, (q); } setp.eq.s32 %p1|%p2, %r1, 0f00000000; }\n";
  ASSERT_EQ(refusal(whole), "accepted");
  int refused = 0;
  for (std::size_t length = 0; length < whole.size(); ++length) {
    refused += refusal(whole.substr(0, length)) != "accepted" ? 1 : 0;
  }
  EXPECT_GT(refused, 300);
}

// ---- fat binaries

struct Part {
  std::uint16_t kind;
  std::uint32_t architecture;
  std::string payload;
};

std::vector<std::byte> fat_binary(const std::vector<Part>& parts) {
  std::string all;
  for (const Part& part : parts) {
    std::string header(64, '\0');
    const std::uint32_t header_bytes = 64;
    const std::uint64_t bytes = part.payload.size();
    std::memcpy(header.data(), &part.kind, 2);
    std::memcpy(header.data() + 4, &header_bytes, 4);
    std::memcpy(header.data() + 8, &bytes, 8);
    std::memcpy(header.data() + 28, &part.architecture, 4);
    all += header + part.payload;
  }
  std::string head(16, '\0');
  const std::uint32_t magic = 0xBA55ED50;
  const std::uint16_t version = 1, head_bytes = 16;
  const std::uint64_t bytes = all.size();
  std::memcpy(head.data(), &magic, 4);
  std::memcpy(head.data() + 4, &version, 2);
  std::memcpy(head.data() + 6, &head_bytes, 2);
  std::memcpy(head.data() + 8, &bytes, 8);
  all = head + all;
  std::vector<std::byte> out(all.size());
  std::memcpy(out.data(), all.data(), all.size());
  return out;
}

TEST(FatBinary, GivesTheHighestArchitectureThatTheDeviceRuns) {
  const auto binary =
      fat_binary({{1, 70, "seventy"}, {2, 80, "machine"}, {1, 80, "eighty"}, {1, 90, "ninety"}});
  EXPECT_EQ(of_fat_binary(binary, 80), "eighty");
  EXPECT_EQ(of_fat_binary(binary, 75), "seventy");
  EXPECT_EQ(of_fat_binary(binary, 120), "ninety");
}

TEST(FatBinary, SaysWhatThereIsAndHowToCompileWhenThereIsNoPtx) {
  try {
    (void)of_fat_binary(fat_binary({{2, 80, "machine"}, {1, 90, "ninety"}}), 80);
    ADD_FAILURE();
  } catch (const SyntaxError& error) {
    EXPECT_THAT(error.what(), HasSubstr("found machine code for 80, PTX for 90"));
    EXPECT_THAT(error.what(), HasSubstr("-gencode arch=compute_80,code=compute_80"));
  }
}

TEST(FatBinary, RefusesEveryCut) {
  const auto binary = fat_binary({{1, 80, "some text"}});
  for (std::size_t length = 0; length < binary.size(); ++length) {
    EXPECT_THROW((void)of_fat_binary(std::span(binary).first(length), 80), SyntaxError) << length;
  }
  EXPECT_EQ(of_fat_binary(binary, 80), "some text");
}

}  // namespace
}  // namespace cuda_on_cpu::ptx
