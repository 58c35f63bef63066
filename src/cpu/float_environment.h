// The floating-point environment that our bits are promised in.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace zero {

// While it lives: round to nearest, subnormals kept, no traps. A user linked with -ffast-math
// flushes subnormals on the calling thread, and new threads inherit that.
class FloatEnvironment {
 public:
#if defined(__x86_64__)
  FloatEnvironment() : before_(_mm_getcsr()) {
    _mm_setcsr(kDefault);
  }
  ~FloatEnvironment() {
    _mm_setcsr(before_);
  }
#else
  FloatEnvironment() = default;
  ~FloatEnvironment() = default;
#endif
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr unsigned kDefault = 0x1f80;
  unsigned before_;
#endif
};

}  // namespace zero
