// Arithmetic on sizes.
#include "core/checked.h"

#include <gtest/gtest.h>

namespace zero {
namespace {

constexpr std::uint64_t kMost = ~std::uint64_t{0};

TEST(Checked, AddsAndMultipliesUpToTheLastBit) {
  EXPECT_EQ(checked_add(kMost - 1, 1), kMost);
  EXPECT_EQ(checked_mul(kMost / 3, 3), kMost);
  EXPECT_EQ(checked_mul(kMost, 0), 0U);
}

TEST(Checked, AnOverflowIsAnError) {
  EXPECT_THROW((void)checked_add(kMost, 1), UsageError);
  EXPECT_THROW((void)checked_mul(kMost / 2, 3), UsageError);
  EXPECT_THROW((void)round_up(kMost - 3, 256), UsageError);
}

TEST(Checked, RoundsUp) {
  EXPECT_EQ(round_up(0, 256), 0U);
  EXPECT_EQ(round_up(1, 256), 256U);
  EXPECT_EQ(round_up(256, 256), 256U);
  EXPECT_EQ(round_up(257, 3), 258U);
  EXPECT_EQ(ceil_div(kMost, 2), kMost / 2 + 1);
  EXPECT_EQ(ceil_div(6, 3), 2U);
  EXPECT_EQ(ceil_div(0, 3), 0U);
}

}  // namespace
}  // namespace zero
