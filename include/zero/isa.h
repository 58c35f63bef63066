// Chooses the vector instruction set at run time. Bits never depend on it: kernels use only
// + - * / and sqrt, and nothing is contracted to a fused multiply-add.
#pragma once

#include <cstdint>

namespace zero {

enum class Isa : std::uint8_t { kBaseline, kAvx2, kAvx512 };

[[nodiscard]] inline bool supports(Isa isa) {
#if defined(__x86_64__)
  switch (isa) {
    case Isa::kAvx512:
      return __builtin_cpu_supports("avx512f") != 0;
    case Isa::kAvx2:
      return __builtin_cpu_supports("avx2") != 0;
    case Isa::kBaseline:
      return true;
  }
#endif
  return isa == Isa::kBaseline;
}

[[nodiscard]] inline Isa best_isa() {
  return supports(Isa::kAvx512) ? Isa::kAvx512 : supports(Isa::kAvx2) ? Isa::kAvx2 : Isa::kBaseline;
}

namespace detail {

// A kernel is a function object whose call operator is always inlined, so that each of these
// functions compiles it anew; no function of ours carries vector code into another's callers.
#if defined(__GNUC__) && !defined(__clang__)
#define ZERO_KERNEL_OPTIONS gnu::optimize("O3", "fp-contract=off")
#define ZERO_AVX512 "avx512f,prefer-vector-width=512"
#else
#define ZERO_KERNEL_OPTIONS gnu::hot
#define ZERO_AVX512 "avx512f"
#endif

template <class Kernel>
[[ZERO_KERNEL_OPTIONS]] void run_baseline(const Kernel& kernel) {
  kernel();
}
#if defined(__x86_64__)
template <class Kernel>
[[ZERO_KERNEL_OPTIONS, gnu::target("avx2")]] void run_avx2(const Kernel& kernel) {
  kernel();
}
template <class Kernel>
[[ZERO_KERNEL_OPTIONS, gnu::target(ZERO_AVX512)]] void run_avx512(const Kernel& kernel) {
  kernel();
}
#endif
#undef ZERO_AVX512
#undef ZERO_KERNEL_OPTIONS

}  // namespace detail

// Runs `kernel()` compiled for `isa`.
// Requires: supports(isa); Kernel::operator() is [[gnu::always_inline]]
template <class Kernel>
void run_with(Isa isa, const Kernel& kernel) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) {
    return detail::run_avx512(kernel);
  }
  if (isa == Isa::kAvx2) {
    return detail::run_avx2(kernel);
  }
#endif
  (void)isa;
  detail::run_baseline(kernel);
}

}  // namespace zero
