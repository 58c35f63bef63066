// Element types and the rounding between them.
#include "zero/dtype.h"

#include <bit>
#include <cmath>
#include <limits>
#include <set>

#include <gtest/gtest.h>

namespace zero {
namespace {

constexpr DType kAll[] = {DType::kFloat32, DType::kBfloat16, DType::kFloat16,
                          DType::kUint16,  DType::kUint8,    DType::kInt64};

TEST(DType, EveryTypeHasItsSizeAndAName) {
  const std::size_t bytes[] = {4, 2, 2, 2, 1, 8};
  std::set<std::string_view> names;
  for (std::size_t i = 0; i < std::size(kAll); ++i) {
    EXPECT_EQ(bytes_of(kAll[i]), bytes[i]);
    names.insert(name_of(kAll[i]));
  }
  EXPECT_EQ(names.size(), std::size(kAll));
  EXPECT_EQ(name_of(DType::kBfloat16), "bf16");
  EXPECT_EQ(name_of(static_cast<DType>(99)), "unknown dtype");
}

// Every bf16 value is an fp32 value with zeros below.
TEST(DType, Bf16ToFloatAndBackKeepsEveryBit) {
  for (std::uint32_t bits = 0; bits <= 0xffffU; ++bits) {
    const bf16 x{static_cast<std::uint16_t>(bits)};
    const bf16 back = to_bf16(to_float(x));
    if (std::isnan(to_float(x))) {
      EXPECT_EQ(back.bits, bits | 0x40U);
    } else {
      EXPECT_EQ(back.bits, bits);
    }
  }
}

// Against a search: the nearer neighbour, and the even one of two at the same distance.
TEST(DType, ToBf16RoundsToNearestEven) {
  std::uint32_t state = 1;
  for (int i = 0; i < 100'000; ++i) {
    state = state * 1'664'525U + 1'013'904'223U;
    const std::uint32_t low = i % 3 == 0 ? 0x8000U : state >> 16;  // often a tie
    const float x = std::bit_cast<float>((state & 0xffff0000U) | (low & 0xffffU));
    if (!std::isfinite(x)) {
      continue;
    }
    const auto truncated = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(x) >> 16);
    const auto away = static_cast<std::uint16_t>(truncated + 1);
    const double below = std::abs(static_cast<double>(x) - to_float(bf16{truncated}));
    // The neighbour of the largest finite value counts as 2^128.
    const double next = std::isinf(to_float(bf16{away}))
                            ? std::copysign(0x1p128, x)
                            : static_cast<double>(to_float(bf16{away}));
    const double above = std::abs(next - static_cast<double>(x));
    const bool up = above < below || (above == below && truncated % 2 == 1);
    ASSERT_EQ(to_bf16(x).bits, up ? away : truncated) << x;
  }
}

TEST(DType, ToBf16KeepsSpecialValues) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(to_float(to_bf16(kInfinity)), kInfinity);
  EXPECT_EQ(to_float(to_bf16(-kInfinity)), -kInfinity);
  EXPECT_EQ(to_float(to_bf16(std::numeric_limits<float>::max())), kInfinity);
  EXPECT_TRUE(std::signbit(to_float(to_bf16(-0.0F))));
  // A NaN whose payload is in the low bits alone must not become an infinity.
  EXPECT_TRUE(std::isnan(to_float(to_bf16(std::bit_cast<float>(0x7f800001U)))));
  EXPECT_TRUE(std::isnan(to_float(to_bf16(std::bit_cast<float>(0xffffffffU)))));
}

}  // namespace
}  // namespace zero
