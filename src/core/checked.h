// Sizes that do not fit in 64 bits are an error, never a small number.
#pragma once

#include <cstdint>

#include "zero/error.h"

namespace zero {

[[nodiscard]] inline std::uint64_t checked_add(std::uint64_t a, std::uint64_t b) {
  std::uint64_t sum = 0;
  require(!__builtin_add_overflow(a, b, &sum),
          "the model, world or options need more bytes than 64 bits can count; expected sizes of "
          "a real machine: look for a wrong dimension, bucket count or user bytes");
  return sum;
}

[[nodiscard]] inline std::uint64_t checked_mul(std::uint64_t a, std::uint64_t b) {
  std::uint64_t product = 0;
  require(!__builtin_mul_overflow(a, b, &product),
          "the model, world or options need more bytes than 64 bits can count; expected sizes of "
          "a real machine: look for a wrong dimension, bucket count or user bytes");
  return product;
}

[[nodiscard]] inline std::uint64_t round_up(std::uint64_t value, std::uint64_t multiple) {
  const std::uint64_t rest = value % multiple;
  return rest == 0 ? value : checked_add(value, multiple - rest);
}

[[nodiscard]] constexpr std::uint64_t ceil_div(std::uint64_t value, std::uint64_t by) {
  return value / by + (value % by == 0 ? 0 : 1);
}

}  // namespace zero
