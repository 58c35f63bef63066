#include "kernels/norm_math.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include <gtest/gtest.h>

namespace zero {
namespace {

using Digits = std::array<std::int64_t, ControlLayout::kBins>;

Digits digits_of(const std::vector<double>& values) {
  ExactSum sum;
  for (const double x : values) {
    sum.add(x);
  }
  Digits out{};
  sum.add_into(out.data());
  return out;
}

double rounded(const Digits& digits) {
  return round_digits(digits.data());
}

// An exact sum by other means: a growing list of doubles without overlap (Shewchuk 1997), whose
// largest is the correctly rounded sum but for ties, which the second largest decides.
double exact_sum(const std::vector<double>& values) {
  std::vector<double> parts;
  for (double x : values) {
    std::vector<double> next;
    for (double y : parts) {
      if (std::abs(x) < std::abs(y)) {
        std::swap(x, y);
      }
      const double high = x + y;
      const double low = y - (high - x);
      if (low != 0) {
        next.push_back(low);
      }
      x = high;
    }
    next.push_back(x);
    parts = next;
  }
  double high = 0, low = 0;
  while (!parts.empty() && low == 0) {
    const double x = high, y = parts.back();
    parts.pop_back();
    high = x + y;
    low = y - (high - x);
  }
  const bool tie_goes_on = !parts.empty() && ((low < 0) == (parts.back() < 0)) && low != 0;
  if (tie_goes_on && 2 * low == (high + 2 * low) - high) {
    high += 2 * low;
  }
  return high;
}

// Squares of fp32 numbers with exponents in [low, high).
std::vector<double> squares(std::size_t count, int low, int high, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<double> out;
  for (std::size_t i = 0; i < count; ++i) {
    const auto mantissa = static_cast<float>(random() & 0xffffffU);
    const int exponent = low + static_cast<int>(random() % static_cast<unsigned>(high - low));
    const double x = std::ldexp(mantissa, exponent - 24);
    out.push_back(x * x);
  }
  return out;
}

TEST(NormMath, RoundsASingleNumberToItself) {
  std::vector<double> values{0, 1, 3, 0x1.fffffffffffffp0, 0x1p-298, 0x1.8p-297, 0x1p264};
  for (int e = -298; e < 373; ++e) {
    values.push_back(std::ldexp(1.0, e));
    if (e >= -298 + 52) {
      values.push_back(std::ldexp(0x1.fffffffffffffp0, e));
      values.push_back(std::ldexp(0x1.0000000000001p0, e));
    }
  }
  for (const double x : values) {
    EXPECT_EQ(rounded(digits_of({x})), x);
  }
}

TEST(NormMath, HoldsSubnormalsAndTheLargestNumbersAtOnce) {
  const double tiny = 0x1p-298;
  const double largest = static_cast<double>(std::numeric_limits<float>::max());
  const double huge = 256 * (largest * largest);
  const Digits digits = digits_of({huge, tiny, huge, tiny, tiny});
  EXPECT_EQ(digits[0], 3);
  EXPECT_EQ(rounded(digits), 2 * huge);
  std::vector<double> many(100'000, huge);
  EXPECT_EQ(rounded(digits_of(many)), 100'000 * huge);
}

TEST(NormMath, AgreesWithAnExactSumByOtherMeans) {
  const struct {
    int low, high;
  } ranges[] = {{-149, -100}, {-20, 20}, {-1, 1}, {-149, 128}, {100, 128}};
  for (const auto& range : ranges) {
    for (unsigned seed = 0; seed < 40; ++seed) {
      const auto values = squares(1 + seed * 7, range.low, range.high, seed);
      EXPECT_EQ(rounded(digits_of(values)), exact_sum(values)) << range.low << " " << seed;
    }
  }
}

TEST(NormMath, RoundsTiesToEvenAndLooksAtTheLowestBit) {
  const double half = 0x1p-53;
  EXPECT_EQ(rounded(digits_of({1, half})), 1);
  EXPECT_EQ(rounded(digits_of({1, 0x1p-52, half})), 1 + 0x1p-51);
  EXPECT_EQ(rounded(digits_of({1, half, 0x1p-298})), 1 + 0x1p-52);
  EXPECT_EQ(rounded(digits_of({0x1.fffffffffffffp0, half})), 2);
}

TEST(NormMath, DoesNotDependOnOrder) {
  auto values = squares(5000, -149, 128, 1);
  const Digits expected = digits_of(values);
  std::mt19937 random(2);
  for (int round = 0; round < 10; ++round) {
    std::shuffle(values.begin(), values.end(), random);
    EXPECT_EQ(digits_of(values), expected);
  }
}

TEST(NormMath, DoesNotDependOnGrouping) {
  const auto values = squares(4000, -60, 60, 3);
  const Digits expected = digits_of(values);
  for (const std::size_t ranks : {1U, 2U, 3U, 7U, 8U, 1000U, 4000U}) {
    Digits all_reduced{}, chained{};
    for (std::size_t r = 0; r < ranks; ++r) {
      ExactSum sum;
      for (std::size_t i = r; i < values.size(); i += ranks) {
        sum.add(values[i]);
      }
      ExactSum again = sum;
      Digits mine{};
      sum.add_into(mine.data());
      for (std::size_t i = 0; i < mine.size(); ++i) {
        all_reduced[i] += mine[i];
      }
      again.add_into(chained.data());
    }
    carry_digits(all_reduced.data());
    EXPECT_EQ(all_reduced, expected) << ranks;
    EXPECT_EQ(chained, expected) << ranks;
  }
}

TEST(NormMath, CarriesBeforeADigitRunsOver) {
  // The most that one addition can add to a digit, three times as often as a digit could hold it.
  const double full = std::ldexp(0x1.fffffffffffffp0, 48 * 5 - 298 + 47);
  ExactSum sum;
  const int times = 3 << 15;
  for (int i = 0; i < times; ++i) {
    sum.add(full);
  }
  Digits digits{};
  sum.add_into(digits.data());
  EXPECT_EQ(rounded(digits), full * times);
  for (const std::int64_t digit : digits) {
    EXPECT_GE(digit, 0);
    EXPECT_LT(digit, std::int64_t{1} << 48);
  }
}

TEST(NormMath, CarriesWhatManyRanksHaveAddedUp) {
  Digits digits{};
  digits[0] = std::numeric_limits<std::int64_t>::max();
  digits[1] = (std::int64_t{1} << 48) - 1;
  digits[2] = (std::int64_t{1} << 48) - 1;
  carry_digits(digits.data());
  EXPECT_EQ(digits[0], (std::int64_t{1} << 48) - 1);
  EXPECT_EQ(digits[1], (std::int64_t{1} << 15) - 2);
  EXPECT_EQ(digits[2], 0);
  EXPECT_EQ(digits[3], 1);
}

}  // namespace
}  // namespace zero
