// Element types of parameters, gradients and optimizer states.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace zero {

struct bf16 {
  std::uint16_t bits = 0;
};

enum class DType : std::uint8_t { kFloat32, kBfloat16, kFloat16, kUint16, kUint8, kInt64 };

// The DType of a C++ element type; cuda.h adds __nv_bfloat16 and __half.
template <class T>
struct dtype_of;
template <>
struct dtype_of<float> {
  static constexpr DType value = DType::kFloat32;
};
template <>
struct dtype_of<bf16> {
  static constexpr DType value = DType::kBfloat16;
};

[[nodiscard]] constexpr std::size_t bytes_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return 4;
    case DType::kInt64:
      return 8;
    case DType::kUint8:
      return 1;
    default:
      return 2;
  }
}

[[nodiscard]] std::string_view name_of(DType);

// Exact.
[[nodiscard]] constexpr float to_float(bf16 x) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16);
}

// Rounds to nearest even; a NaN stays a (quiet) NaN.
[[nodiscard]] constexpr bf16 to_bf16(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  if ((bits & 0x7fffffffU) > 0x7f800000U) {
    return {static_cast<std::uint16_t>((bits >> 16) | 0x40U)};
  }
  return {static_cast<std::uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16)};
}

}  // namespace zero
