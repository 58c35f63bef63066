// Eight fp32 lanes, and one loop over an array that runs with the widest instructions of the CPU.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gpt::simd {

inline constexpr std::size_t kLanes = 8;
using Lanes [[gnu::vector_size(32)]] = float;
using LaneBits [[gnu::vector_size(32)]] = std::int32_t;

// `count` <= kLanes values; the other lanes are 0.
[[gnu::always_inline]] inline Lanes load(const float* from, std::size_t count = kLanes) {
  Lanes out{};
  __builtin_memcpy(&out, from, count == kLanes ? sizeof out : count * sizeof(float));
  return out;
}

[[gnu::always_inline]] inline void store(float* to, const Lanes& values,
                                         std::size_t count = kLanes) {
  __builtin_memcpy(to, &values, count == kLanes ? sizeof values : count * sizeof(float));
}

[[gnu::always_inline]] inline Lanes splat(float x) {
  return Lanes{x, x, x, x, x, x, x, x};
}

[[gnu::always_inline]] inline Lanes larger(const Lanes& a, const Lanes& b) {
  return a > b ? a : b;
}

// `values` where the lane is below `count`, else `other`.
[[gnu::always_inline]] inline Lanes keep_first(const Lanes& values, std::size_t count,
                                               const Lanes& other) {
  constexpr LaneBits kIndex{0, 1, 2, 3, 4, 5, 6, 7};
  const auto n = static_cast<std::int32_t>(count);
  return kIndex < LaneBits{n, n, n, n, n, n, n, n} ? values : other;
}

// A fixed tree, so that the bits depend on nothing but the lanes.
[[gnu::always_inline]] inline float sum(const Lanes& v) {
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

[[gnu::always_inline]] inline float largest(const Lanes& v) {
  float out = v[0];
  for (std::size_t i = 1; i < kLanes; ++i) {
    out = v[i] > out ? v[i] : out;
  }
  return out;
}

// exp(x) to 2e-7 relative; x below -87 gives less than 2e-38, above 88 less than infinity.
// NaN stays NaN. x = n ln 2 + r with |r| <= ln 2 / 2, ln 2 split so that n * kHigh is exact;
// exp(r) = 1 + r + r^2 p(r), p interpolated at the Chebyshev nodes.
[[gnu::always_inline]] inline Lanes exp(const Lanes& x) {
  constexpr float kHigh = 0x1.62e0p-1F, kLow = 0x1.0bfbe8p-15F;
  constexpr float kRound = 0x1.8p23F;  // adding it leaves the nearest integer in the low bits
  const Lanes lowest = splat(-87.0F), highest = splat(88.0F);
  Lanes clamped = x < lowest ? lowest : x;
  clamped = clamped > highest ? highest : clamped;
  const Lanes shifted = clamped * 0x1.715476p+0F + kRound;
  const Lanes n = shifted - kRound;
  const Lanes r = (clamped - n * kHigh) - n * kLow;
  Lanes p = splat(0x1.6d10fcp-10F);
  p = p * r + 0x1.120b62p-7F;
  p = p * r + 0x1.55551ap-5F;
  p = p * r + 0x1.5554dep-3F;
  p = p * r + 0.5F;
  const Lanes mantissa = (p * (r * r) + r) + 1.0F;
  LaneBits exponent{};
  __builtin_memcpy(&exponent, &shifted, sizeof exponent);
  exponent = (exponent << 23) + (127 << 23);
  Lanes scale{};
  __builtin_memcpy(&scale, &exponent, sizeof scale);
  return mantissa * scale;
}

// body(first, count) for runs of kLanes elements and what is left.
template <class Body>
[[gnu::always_inline]] inline void for_lanes(std::size_t elements, Body&& body) {
  std::size_t i = 0;
  for (; i + kLanes <= elements; i += kLanes) {
    body(i, kLanes);
  }
  if (i < elements) {
    body(i, elements - i);
  }
}

template <class Kernel, class... Arguments>
[[gnu::target("avx2")]] void run_avx2(const Arguments&... arguments) {
  Kernel::run(arguments...);
}

template <class Kernel, class... Arguments>
void run_baseline(const Arguments&... arguments) {
  Kernel::run(arguments...);
}

// Kernel::run must be always_inline. Its bits are the same on every CPU: no contraction.
template <class Kernel, class... Arguments>
void dispatch(const Arguments&... arguments) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) {
    run_avx2<Kernel>(arguments...);
    return;
  }
#endif
  run_baseline<Kernel>(arguments...);
}

}  // namespace gpt::simd
