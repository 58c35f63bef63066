#include "cpu/cpu_kernels.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <type_traits>

#include "zero/error.h"
#include "zero/make_rule.h"

#include "kernels/step_math.h"

namespace zero::cpu {
namespace {

// Elements of a block that stays in the innermost cache while it is summed.
constexpr std::size_t kBlock = 1024;

template <class Into, class From, First kFirst>
struct AccumulateKernel {
  Into* into;
  const From* from;
  std::size_t count;

  [[gnu::always_inline]] inline void operator()() const {
    // Either apart or the same array: each element is read before it is written.
#pragma GCC ivdep
    for (std::size_t i = 0; i < count; ++i) {
      const float x = detail::load(from[i]);
      detail::store(into[i], kFirst == First::kYes ? x : detail::load(into[i]) + x);
    }
  }
};

template <class Into, class From>
void accumulate_as(Isa isa, Into* into, const From* from, std::size_t count, First first) {
  if (first == First::kYes) {
    run_with(isa, AccumulateKernel<Into, From, First::kYes>{into, from, count});
  } else {
    run_with(isa, AccumulateKernel<Into, From, First::kNo>{into, from, count});
  }
}

template <class Into>
void accumulate_into(Isa isa, Into* into, Source from, Range range, First first) {
  const auto [begin, end] = range;
  if (from.dtype == DType::kFloat32) {
    accumulate_as(isa, into + begin, static_cast<const float*>(from.data) + begin, end - begin,
                  first);
  } else {
    accumulate_as(isa, into + begin, static_cast<const bf16*>(from.data) + begin, end - begin,
                  first);
  }
}

using detail::load;
ZERO_HD std::uint64_t load(std::uint64_t x) {
  return x;
}

// Sums blocks of rows; int64 is summed as uint64, where overflow is defined.
template <class In, class Sum>
struct TreeKernel {
  Sum* out;
  std::span<const void* const> in;
  std::size_t begin, end;

  [[gnu::always_inline]] inline const In* row(std::size_t i, std::size_t at) const {
    return static_cast<const In*>(in[i]) + at;
  }

  // to = the tree over rows [first, first + n), n <= 4: to may be one of them, because each
  // element is read from all of them before it is written.
  [[gnu::always_inline]] inline void leaf(Sum* to, std::size_t first, std::size_t n, std::size_t at,
                                          std::size_t count) const {
    const In* const a = row(first, at);
    const In* const b = row(first + (n > 1 ? 1 : 0), at);
    const In* const c = row(first + (n > 2 ? 2 : 0), at);
    const In* const d = row(first + (n > 3 ? 3 : 0), at);
    const auto loop = [&](auto sum) __attribute__((always_inline)) {
#pragma GCC ivdep
      for (std::size_t i = 0; i < count; ++i) {
        to[i] = sum(i);
      }
    };
    if (n == 1) {
      loop([&](std::size_t i) __attribute__((always_inline)) { return load(a[i]); });
    } else if (n == 2) {
      loop([&](std::size_t i) __attribute__((always_inline)) { return load(a[i]) + load(b[i]); });
    } else if (n == 3) {
      loop([&](std::size_t i)
               __attribute__((always_inline)) { return (load(a[i]) + load(b[i])) + load(c[i]); });
    } else {
      loop([&](std::size_t i) __attribute__((always_inline)) {
        return (load(a[i]) + load(b[i])) + (load(c[i]) + load(d[i]));
      });
    }
  }

  // The tree's leaves of at most 4 rows come in order; `sums[k]` is the sum of 4 * 2^k rows that
  // wait for their right neighbours: a binary counter, which is the same tree.
  [[gnu::always_inline]] inline void block(std::size_t at, std::size_t count) const {
    constexpr std::size_t kLevels = ControlLayout::kLaneBits - 2;  // 4 * 2^kLevels ranks
    Sum sums[kLevels][kBlock];
    std::size_t waiting = 0;  // bit k: sums[k] is taken
    const auto add = [&](Sum * into, const Sum* left) __attribute__((always_inline)) {
#pragma GCC ivdep
      for (std::size_t i = 0; i < count; ++i) {
        into[i] = left[i] + into[i];
      }
    };
    Sum last[kBlock];
    for (std::size_t first = 0; first < in.size(); first += 4) {
      const std::size_t n = std::min<std::size_t>(4, in.size() - first);
      leaf(last, first, n, at, count);
      if (first + n == in.size()) {
        break;
      }
      std::size_t level = 0;
      for (; (waiting >> level) % 2 == 1; ++level) {
        add(last, sums[level]);
      }
      std::copy_n(last, count, sums[level]);
      waiting = waiting + 1;
    }
    for (std::size_t level = 0; waiting >> level != 0; ++level) {
      if ((waiting >> level) % 2 == 1) {
        add(last, sums[level]);
      }
    }
    std::copy_n(last, count, out + at);
  }

  [[gnu::always_inline]] inline void operator()() const {
    if (in.size() <= 4) {
      leaf(out + begin, 0, in.size(), begin, end - begin);
      return;
    }
    for (std::size_t at = begin; at < end; at += kBlock) {
      block(at, std::min(kBlock, end - at));
    }
  }
};

// The sum of squares of each 256 elements, in 16 columns that are then summed as a tree: the
// order of the design, whatever the width of a register.
struct SquaresKernel {
  const float* gradients;
  std::size_t count;
  double* sums;  // one for each 256 elements, the last of them perhaps of fewer

  [[gnu::always_inline]] inline void operator()() const {
    constexpr std::size_t kColumns = 16;
    for (std::size_t begin = 0; begin < count; begin += kGranule) {
      const float* const g = gradients + begin;
      const std::size_t n = std::min<std::size_t>(kGranule, count - begin);
      double columns[kColumns] = {};
      std::size_t i = 0;
      for (; i + kColumns <= n; i += kColumns) {
        for (std::size_t k = 0; k < kColumns; ++k) {
          columns[k] += static_cast<double>(g[i + k]) * static_cast<double>(g[i + k]);
        }
      }
      for (std::size_t k = 0; i + k < n; ++k) {
        columns[k] += static_cast<double>(g[i + k]) * static_cast<double>(g[i + k]);
      }
      for (std::size_t half = kColumns / 2; half > 0; half /= 2) {
        for (std::size_t k = 0; k < half; ++k) {
          columns[k] += columns[k + half];
        }
      }
      sums[begin / kGranule] = columns[0];
    }
  }
};

std::int64_t count_non_finite(const float* gradients, std::size_t count) {
  return std::count_if(gradients, gradients + count, [](float g) { return !std::isfinite(g); });
}

}  // namespace

void accumulate(Isa isa, Operand into, Source from, Range range, First first) {
  if (into.dtype == DType::kFloat32) {
    accumulate_into(isa, static_cast<float*>(into.data), from, range, first);
  } else {
    accumulate_into(isa, static_cast<bf16*>(into.data), from, range, first);
  }
}

void sum_tree(Isa isa, void* out, std::span<const void* const> in, DType dtype, Range range) {
  const auto [begin, end] = range;
  if (dtype == DType::kInt64) {
    run_with(isa, TreeKernel<std::uint64_t, std::uint64_t>{static_cast<std::uint64_t*>(out), in,
                                                           begin, end});
  } else if (dtype == DType::kFloat32) {
    run_with(isa, TreeKernel<float, float>{static_cast<float*>(out), in, begin, end});
  } else {
    run_with(isa, TreeKernel<bf16, float>{static_cast<float*>(out), in, begin, end});
  }
}

void measure(Isa isa, const UpdateArguments& a, Range chunks, Measured& found) {
  double sums[kChunkElements / kGranule];
  for (std::size_t k = chunks.begin; k < chunks.end; ++k) {
    const Chunk& c = a.chunks[k];
    const float* const gradients = a.gradients + c.gradient_at;
    run_with(isa, SquaresKernel{gradients, c.count, sums});
    for (std::size_t at = 0; at < c.count; at += kGranule) {
      const double sum = sums[at / kGranule];
      if (!std::isfinite(sum)) {  // only then: 256 squares of fp32 numbers fit in a double
        found.non_finite +=
            count_non_finite(gradients + at, std::min<std::size_t>(kGranule, c.count - at));
        found.lowest = std::min(found.lowest, c.parameter);
      } else if (a.rows[c.parameter].counted != 0) {
        found.squares.add(sum);
      }
    }
  }
}

void add_to_control(const UpdateArguments& a, Measured& found) {
  found.squares.add_into(a.control);
  if (found.non_finite > 0) {
    a.control[ControlLayout::kNonFinite] += found.non_finite;
    std::int64_t& slot = a.control[ControlLayout::kFirstSlot + static_cast<std::size_t>(a.rank)];
    const std::int64_t mine = std::int64_t{found.lowest} + 1;
    slot = slot == 0 ? mine : std::min(slot, mine);
  }
}

void prepare(const UpdateArguments& a) {
  *a.scalars = find_scalars(a);
  for (std::size_t row = 0; row < a.row_count; ++row) {
    prepare_row(a, row, a.scalars->skip != 0);
  }
}

}  // namespace zero::cpu
