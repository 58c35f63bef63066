// Sums squares exactly: the sum does not depend on order or grouping, so neither does the norm.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "zero/host_device.h"
#include "zero/update_arguments.h"

namespace zero {

// A fixed-point number of ControlLayout::kBins digits of 48 bits, lowest digit first, whose lowest
// bit is 2^-298: the square of the smallest fp32 subnormal. So any sum in double of squares of
// fp32 numbers fits without rounding. Digits may run over until they are carried.
inline constexpr int kDigitBits = 48;
inline constexpr int kLowestExponent = -298;
inline constexpr std::uint64_t kDigitMask = (std::uint64_t{1} << kDigitBits) - 1;
// Each addition adds less than 2^48 to a digit: this many fit into 63 bits, with room to spare.
inline constexpr std::uint32_t kAdditionsPerCarry = (1U << 14) - 1;

// Requires: x is finite, >= 0, < 2^373 and a multiple of 2^-298
ZERO_HD void add_to_digits(std::int64_t* digits, double x) {
  const auto bits = std::bit_cast<std::uint64_t>(x);
  constexpr int kMantissaBits = 52, kBias = 1023;
  const int exponent = static_cast<int>(bits >> kMantissaBits);
  if (exponent == 0) {
    return;  // zero: a subnormal double is no multiple of 2^-298
  }
  std::uint64_t mantissa =
      (bits & ((std::uint64_t{1} << kMantissaBits) - 1)) | (std::uint64_t{1} << kMantissaBits);
  int shift = exponent - kBias - kMantissaBits - kLowestExponent;
  if (shift < 0) {
    mantissa >>= -shift;  // the bits below 2^-298 are zeros
    shift = 0;
  }
  const int digit = shift / kDigitBits;
  const int at = shift % kDigitBits;
  const std::uint64_t above = mantissa >> (kDigitBits - at);
  digits[digit] += static_cast<std::int64_t>((mantissa << at) & kDigitMask);
  if (above != 0) {
    digits[digit + 1] += static_cast<std::int64_t>(above & kDigitMask);
  }
  if (above > kDigitMask) {
    digits[digit + 2] += static_cast<std::int64_t>(above >> kDigitBits);
  }
}

// Leaves every digit but the highest below 2^48; the value stays. Digits are read as unsigned.
ZERO_HD void carry_digits(std::int64_t* digits) {
  for (std::size_t i = 0; i + 1 < ControlLayout::kBins; ++i) {
    const auto digit = static_cast<std::uint64_t>(digits[i]);
    digits[i] = static_cast<std::int64_t>(digit & kDigitMask);
    digits[i + 1] += static_cast<std::int64_t>(digit >> kDigitBits);
  }
}

ZERO_HD std::uint64_t bit_of_digits(const std::int64_t* digits, int bit) {
  return (static_cast<std::uint64_t>(digits[bit / kDigitBits]) >> (bit % kDigitBits)) & 1U;
}

// The value, rounded once to the nearest double, ties to even.
// Requires: carried digits, the highest below 2^48
ZERO_HD double round_digits(const std::int64_t* digits) {
  constexpr int kBits = kDigitBits * static_cast<int>(ControlLayout::kBins);
  int top = kBits - 1;
  while (top >= 0 && bit_of_digits(digits, top) == 0) {
    --top;
  }
  if (top < 0) {
    return 0.0;
  }
  constexpr int kMantissaBits = 53, kBias = 1023;
  std::uint64_t mantissa = 0;  // 53 bits from the highest one on, and the bit after them
  for (int i = 0; i <= kMantissaBits; ++i) {
    mantissa = 2 * mantissa + (top >= i ? bit_of_digits(digits, top - i) : 0);
  }
  bool rest = false;
  for (int bit = top - kMantissaBits - 1; bit >= 0 && !rest; --bit) {
    rest = bit_of_digits(digits, bit) != 0;
  }
  const bool up = mantissa % 2 == 1 && (rest || mantissa / 2 % 2 == 1);
  const auto exponent =
      static_cast<std::uint64_t>(top - (kMantissaBits - 1) + kLowestExponent + kBias);
  return static_cast<double>(mantissa / 2 + (up ? 1 : 0)) * std::bit_cast<double>(exponent << 52U);
}

// Digits that carry themselves in time.
class ExactSum {
 public:
  // Requires: as add_to_digits
  ZERO_HD void add(double x) {
    add_to_digits(digits_, x);
    if (++since_carry_ == kAdditionsPerCarry) {
      carry();
    }
  }
  // Adds the sum to carried digits, which stay carried.
  ZERO_HD void add_into(std::int64_t* digits) {
    carry();
    for (std::size_t i = 0; i < ControlLayout::kBins; ++i) {
      digits[i] += digits_[i];
    }
    carry_digits(digits);
  }

 private:
  ZERO_HD void carry() {
    carry_digits(digits_);
    since_carry_ = 0;
  }

  std::int64_t digits_[ControlLayout::kBins] = {};
  std::uint32_t since_carry_ = 0;
};

}  // namespace zero
