// Scales the times in tests by ZERO_TEST_TIME_SCALE: sanitizers and loaded machines are slower.
#pragma once

#include <chrono>
#include <cstdlib>

namespace zero::testing {

// The value of ZERO_TEST_TIME_SCALE; 1 when it is not set or not a positive number.
[[nodiscard]] inline double time_scale() {
  const char* text = std::getenv("ZERO_TEST_TIME_SCALE");
  const double scale = text == nullptr ? 1.0 : std::strtod(text, nullptr);
  return scale > 0.0 ? scale : 1.0;
}

[[nodiscard]] inline std::chrono::milliseconds scaled(std::chrono::milliseconds time) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
      std::chrono::duration<double, std::milli>(time) * time_scale());
}

}  // namespace zero::testing
