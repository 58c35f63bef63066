// Arrays in a backend's memory, values that tell, and comparison by bits.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "zero/backend.h"
#include "zero/error.h"

namespace zero::testing {

template <class T>
[[nodiscard]] Buffer upload(Backend& backend, const std::vector<T>& values) {
  Buffer out = backend.allocate({values.size() * sizeof(T), Category::kUser});
  backend.copy(out.data(), values.data(), out.bytes(), kHost);
  return out;
}
template <class T>
[[nodiscard]] std::vector<T> download(Backend& backend, const Buffer& from) {
  std::vector<T> out(from.bytes() / sizeof(T));
  backend.copy(out.data(), from.data(), from.bytes(), kHost);
  return out;
}

// The message of the Error that waiting for `event` throws; "" when there is none.
[[nodiscard]] inline std::string error_of(Backend& backend, const Event& event) {
  try {
    backend.host_wait(event);
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

// Bits of all kinds: wide and narrow exponents, both zeros, subnormals.
[[nodiscard]] inline std::vector<float> mixed_values(std::size_t count, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<float> out(count);
  for (float& x : out) {
    const auto bits = static_cast<std::uint32_t>(random());
    switch (bits % 5) {
      case 0:
        x = std::bit_cast<float>((bits & 0x80000000U) |
                                 (static_cast<std::uint32_t>(random()) & 0x007fffffU));
        break;
      case 1:
        x = (bits & 0x80000000U) != 0 ? -0.0F : 0.0F;
        break;
      default:
        x = std::ldexp(static_cast<float>(static_cast<std::int32_t>(random())),
                       static_cast<int>(bits / 8 % 60) - 60);
    }
  }
  return out;
}
[[nodiscard]] inline std::vector<bf16> rounded(const std::vector<float>& values) {
  std::vector<bf16> out;
  for (const float x : values) {
    out.push_back(to_bf16(x));
  }
  return out;
}

[[nodiscard]] inline std::uint32_t bits_of(float x) {
  return std::bit_cast<std::uint32_t>(x);
}
[[nodiscard]] inline std::uint32_t bits_of(bf16 x) {
  return x.bits;
}
[[nodiscard]] inline std::uint64_t bits_of(std::int64_t x) {
  return static_cast<std::uint64_t>(x);
}

// The first difference in bits, in words; "" for none.
template <class T>
[[nodiscard]] std::string differ(const std::vector<T>& found, const std::vector<T>& expected) {
  if (found.size() != expected.size()) {
    return std::to_string(found.size()) + " elements, not " + std::to_string(expected.size());
  }
  for (std::size_t i = 0; i < found.size(); ++i) {
    if (bits_of(found[i]) != bits_of(expected[i])) {
      return "[" + std::to_string(i) + "] of " + std::to_string(found.size()) + ": bits " +
             std::to_string(bits_of(found[i])) + ", not " + std::to_string(bits_of(expected[i]));
    }
  }
  return "";
}

template <class T>
[[nodiscard]] T as(float x) {
  if constexpr (std::is_same_v<T, bf16>) {
    return to_bf16(x);
  } else {
    return x;
  }
}
[[nodiscard]] inline float value_of(float x) {
  return x;
}
[[nodiscard]] inline float value_of(bf16 x) {
  return to_float(x);
}
template <class T>
[[nodiscard]] std::vector<T> values_as(std::size_t count, std::uint32_t seed) {
  std::vector<T> out;
  for (const float x : mixed_values(count, seed)) {
    out.push_back(as<T>(x));
  }
  return out;
}

}  // namespace zero::testing
