// Conversions between fp32 and bf16, by the library's loops on every instruction set.
#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include "cpu/cpu_kernels.h"
#include "tests/memory/arrays.h"

namespace zero::testing {
namespace {

// Rounds by looking at both neighbours, as the standard describes it.
std::uint16_t nearest(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const auto down = static_cast<std::uint16_t>(bits >> 16U);
  const double exact = std::abs(static_cast<double>(x));
  const auto magnitude = [](std::uint32_t b) {
    const std::uint32_t wide = (b & 0x7fffU) << 16U;  // infinity counts as 2^128
    return wide == 0x7f800000U ? 0x1p128 : static_cast<double>(std::bit_cast<float>(wide));
  };
  const double below = exact - magnitude(down), above = magnitude(down + 1U) - exact;
  const bool up = above < below || (above == below && down % 2 == 1);
  return static_cast<std::uint16_t>(down + (up ? 1 : 0));
}

// All upper halves with the lower halves where rounding changes.
std::vector<float> telling_floats() {
  std::vector<float> out;
  for (std::uint32_t high = 0; high < 0x10000U; ++high) {
    for (const std::uint32_t low : {0U, 1U, 0x7fffU, 0x8000U, 0x8001U, 0xffffU, high * 40'503U}) {
      out.push_back(std::bit_cast<float>(high << 16U | (low & 0xffffU)));
    }
  }
  return out;
}

TEST(Bf16, ConvertsAllItsValuesToFp32AndBack) {
  for (std::uint32_t bits = 0; bits < 0x10000U; ++bits) {
    const bf16 x{static_cast<std::uint16_t>(bits)};
    const float wide = to_float(x);
    EXPECT_EQ(std::bit_cast<std::uint32_t>(wide), bits << 16U);
    const std::uint32_t expected = std::isnan(wide) ? bits | 0x40U : bits;
    EXPECT_EQ(to_bf16(wide).bits, expected);
  }
}

TEST(Bf16, RoundsToNearestEven) {
  for (const float x : telling_floats()) {
    if (std::isfinite(x)) {
      ASSERT_EQ(to_bf16(x).bits, nearest(x)) << x;
    }
  }
}

TEST(Bf16, KeepsInfinitiesAndNaN) {
  const float inf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(to_float(to_bf16(inf)), inf);
  EXPECT_EQ(to_float(to_bf16(-inf)), -inf);
  EXPECT_EQ(to_float(to_bf16(std::numeric_limits<float>::max())), inf);
  for (const float x : telling_floats()) {
    ASSERT_EQ(std::isnan(to_float(to_bf16(x))), std::isnan(x));
  }
}

TEST(Bf16, ConvertsTheSameOnEveryInstructionSet) {
  auto values = telling_floats();
  std::vector<bf16> expected;
  for (const float x : values) {
    expected.push_back(to_bf16(x));
  }
  for (const Isa isa : {Isa::kBaseline, Isa::kAvx2, Isa::kAvx512}) {
    if (!supports(isa)) {
      continue;
    }
    std::vector<bf16> low(values.size());
    cpu::accumulate(isa, {low.data(), DType::kBfloat16}, {values.data(), DType::kFloat32},
                    {0, values.size()}, First::kYes);
    EXPECT_EQ(differ(low, expected), "") << static_cast<int>(isa);
    std::vector<float> wide(values.size());
    cpu::accumulate(isa, {wide.data(), DType::kFloat32}, {low.data(), DType::kBfloat16},
                    {0, values.size()}, First::kYes);
    std::vector<float> back;
    for (const bf16 x : expected) {
      back.push_back(to_float(x));
    }
    EXPECT_EQ(differ(wide, back), "") << static_cast<int>(isa);
  }
}

// Sums and squares of every instruction set against the baseline's.
TEST(CpuKernels, GiveTheSameBitsOnEveryInstructionSet) {
  std::vector<std::vector<float>> rows;
  std::vector<const void*> in;
  for (std::uint32_t r = 0; r < 11; ++r) {
    rows.push_back(mixed_values(3001, r));
    in.push_back(rows.back().data());
  }
  const auto run = [&](Isa isa, std::size_t ranks) {
    std::vector<float> out(3001);
    cpu::sum_tree(isa, out.data(), std::span(in).first(ranks), DType::kFloat32, {0, 3001});
    return out;
  };
  const Chunk chunk{.count = 3001};
  ParameterRow row;
  UpdateArguments a;
  a.gradients = rows[0].data();
  a.chunks = &chunk;
  a.rows = &row;
  const auto measure = [&](Isa isa) {
    std::vector<std::int64_t> control(ControlLayout::words(1, 1));
    cpu::Measured found;
    cpu::measure(isa, a, {0, 1}, found);
    a.control = control.data();
    cpu::add_to_control(a, found);
    return control;
  };
  for (const Isa isa : {Isa::kAvx2, Isa::kAvx512}) {
    if (supports(isa)) {
      for (const std::size_t ranks : {1U, 2U, 3U, 4U, 11U}) {
        EXPECT_EQ(differ(run(isa, ranks), run(Isa::kBaseline, ranks)), "") << ranks;
      }
      EXPECT_EQ(measure(isa), measure(Isa::kBaseline));
    }
  }
}

}  // namespace
}  // namespace zero::testing
