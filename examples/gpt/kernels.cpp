#include "gpt/kernels.h"

#include <cmath>

#include "gpt/simd.h"

#define LANES_INLINE __attribute__((always_inline))

namespace gpt {
namespace {

using simd::for_lanes;
using simd::Lanes;
using simd::load;
using simd::splat;
using simd::store;

constexpr float kEpsilon = 1e-5F;

struct Moments {
  float mean = 0, inverse = 0;  // inverse: 1 / sqrt(variance + epsilon)
};

[[gnu::always_inline]] inline Moments moments(const float* x, std::size_t width) {
  Lanes total{};
  for_lanes(width, [&](std::size_t i, std::size_t n) LANES_INLINE { total += load(x + i, n); });
  const auto count = static_cast<float>(width);
  const float mean = simd::sum(total) / count;
  Lanes squares{};
  for_lanes(width, [&](std::size_t i, std::size_t n) LANES_INLINE {
    const Lanes centred = simd::keep_first(load(x + i, n) - mean, n, Lanes{});
    squares += centred * centred;
  });
  return {mean, 1.0F / std::sqrt(simd::sum(squares) / count + kEpsilon)};
}

struct LayerNorm {
  [[gnu::always_inline]] static void run(const float* x, const NormWeights& norm, float* out,
                                         Rows rows) {
    for (std::size_t r = 0; r < rows.count; ++r, x += rows.width, out += rows.width) {
      const Moments m = moments(x, rows.width);
      for_lanes(rows.width, [&](std::size_t i, std::size_t n) LANES_INLINE {
        const Lanes normed = (load(x + i, n) - m.mean) * m.inverse;
        store(out + i, normed * load(norm.weight + i, n) + load(norm.bias + i, n), n);
      });
    }
  }
};

struct LayerNormBackward {
  [[gnu::always_inline]] static void row(const NormBackward& b, std::size_t at, std::size_t width) {
    const float *x = b.x + at, *d_out = b.d_out + at;
    const Moments m = moments(x, width);
    Lanes sum_g{}, sum_gx{};  // g: the gradient of the normalised row
    for_lanes(width, [&](std::size_t i, std::size_t n) LANES_INLINE {
      const Lanes dy = load(d_out + i, n), normed = (load(x + i, n) - m.mean) * m.inverse;
      const Lanes g = dy * load(b.weight + i, n);
      sum_g += g;
      sum_gx += g * normed;
      store(b.d_weight + i, load(b.d_weight + i, n) + dy * normed, n);
      store(b.d_bias + i, load(b.d_bias + i, n) + dy, n);
    });
    const auto count = static_cast<float>(width);
    const float mean_g = simd::sum(sum_g) / count, mean_gx = simd::sum(sum_gx) / count;
    for_lanes(width, [&](std::size_t i, std::size_t n) LANES_INLINE {
      const Lanes normed = (load(x + i, n) - m.mean) * m.inverse;
      const Lanes g = load(d_out + i, n) * load(b.weight + i, n);
      const Lanes d_x = ((g - mean_g) - normed * mean_gx) * m.inverse;
      float* to = b.d_x + at + i;
      store(to, b.into == Into::kAdd ? load(to, n) + d_x : d_x, n);
    });
  }
  [[gnu::always_inline]] static void run(const NormBackward& b, Rows rows) {
    for (std::size_t i = 0; i < rows.width; ++i) {
      b.d_weight[i] = 0;
      b.d_bias[i] = 0;
    }
    for (std::size_t r = 0; r < rows.count; ++r) {
      row(b, r * rows.width, rows.width);
    }
  }
};

struct AddBias {
  [[gnu::always_inline]] static void run(const float* x, const float* bias, float* out, Rows rows) {
    for (std::size_t r = 0; r < rows.count; ++r, x += rows.width, out += rows.width) {
      for_lanes(rows.width, [&](std::size_t i, std::size_t n) LANES_INLINE {
        store(out + i, load(x + i, n) + load(bias + i, n), n);
      });
    }
  }
};

// 0.5 (1 + tanh u) = 1 / (1 + exp(-2u)), u = sqrt(2 / pi) (x + 0.044715 x^3).
constexpr float kTwoRoot = 1.5957691216057308F, kCubic = 0.044715F;

[[gnu::always_inline]] inline Lanes gate(const Lanes& x) {
  const Lanes twice_u = kTwoRoot * (x + kCubic * (x * x * x));
  return 1.0F / (1.0F + simd::exp(-twice_u));
}

struct BiasGelu {
  [[gnu::always_inline]] static void run(float* x, const float* bias, float* out, Rows rows) {
    for (std::size_t r = 0; r < rows.count; ++r, x += rows.width, out += rows.width) {
      for_lanes(rows.width, [&](std::size_t i, std::size_t n) LANES_INLINE {
        const Lanes v = load(x + i, n) + load(bias + i, n);
        store(x + i, v, n);
        store(out + i, v * gate(v), n);
      });
    }
  }
};

struct SplitGelu {
  [[gnu::always_inline]] static void run(float* x, float* out, std::size_t count) {
    for_lanes(count, [&](std::size_t i, std::size_t n) LANES_INLINE {
      const Lanes v = load(x + i, n), g = gate(v);
      const Lanes slope = kTwoRoot * (1.0F + 3.0F * kCubic * (v * v));
      store(out + i, v * g, n);
      store(x + i, g + v * (g * (1.0F - g)) * slope, n);
    });
  }
};

struct Multiply {
  [[gnu::always_inline]] static void run(float* x, const float* factor, float* sums, Rows rows) {
    for (std::size_t i = 0; i < rows.width; ++i) {
      sums[i] = 0;
    }
    for (std::size_t r = 0; r < rows.count; ++r, x += rows.width, factor += rows.width) {
      for_lanes(rows.width, [&](std::size_t i, std::size_t n) LANES_INLINE {
        const Lanes v = load(x + i, n) * load(factor + i, n);
        store(x + i, v, n);
        store(sums + i, load(sums + i, n) + v, n);
      });
    }
  }
};

struct SumColumns {
  [[gnu::always_inline]] static void run(const float* x, float* sums, Rows rows) {
    for (std::size_t i = 0; i < rows.width; ++i) {
      sums[i] = 0;
    }
    for (std::size_t r = 0; r < rows.count; ++r, x += rows.width) {
      for_lanes(rows.width, [&](std::size_t i, std::size_t n) LANES_INLINE {
        store(sums + i, load(sums + i, n) + load(x + i, n), n);
      });
    }
  }
};

struct Add {
  [[gnu::always_inline]] static void run(float* out, const float* x, std::size_t count) {
    for_lanes(count, [&](std::size_t i, std::size_t n)
                         LANES_INLINE { store(out + i, load(out + i, n) + load(x + i, n), n); });
  }
};

// Turns the first `count` elements into exp(x - max) and returns their sum.
[[gnu::always_inline]] inline float exponentials(float* x, float highest, std::size_t count) {
  Lanes total{};
  for_lanes(count, [&](std::size_t i, std::size_t n) LANES_INLINE {
    const Lanes e = simd::keep_first(simd::exp(load(x + i, n) - highest), n, Lanes{});
    store(x + i, e, n);
    total += e;
  });
  return simd::sum(total);
}

[[gnu::always_inline]] inline float largest(const float* x, std::size_t count) {
  Lanes best = splat(x[0]);
  for_lanes(count, [&](std::size_t i, std::size_t n) LANES_INLINE {
    best = simd::larger(simd::keep_first(load(x + i, n), n, splat(x[0])), best);
  });
  return simd::largest(best);
}

[[gnu::always_inline]] inline void scale_by(float* x, float factor, std::size_t count) {
  for_lanes(count, [&](std::size_t i, std::size_t n)
                       LANES_INLINE { store(x + i, load(x + i, n) * factor, n); });
}

struct CausalSoftmax {
  [[gnu::always_inline]] static void run(float* scores, std::size_t first_query, Rows rows) {
    for (std::size_t r = 0; r < rows.count; ++r, scores += rows.width) {
      const std::size_t seen = first_query + r + 1;
      const float total = exponentials(scores, largest(scores, seen), seen);
      scale_by(scores, 1.0F / total, seen);
      for (std::size_t i = seen; i < rows.width; ++i) {
        scores[i] = 0;
      }
    }
  }
};

struct SoftmaxBackward {
  [[gnu::always_inline]] static void run(float* p, const float* d_p, const Heads& heads,
                                         float scale, Rows rows) {
    for (std::size_t r = 0; r < rows.count; ++r, p += rows.width, d_p += rows.width) {
      const float *o = heads.output + r * heads.stride, *d_o = heads.d_output + r * heads.stride;
      Lanes total{};
      for_lanes(heads.width, [&](std::size_t i, std::size_t n)
                                 LANES_INLINE { total += load(o + i, n) * load(d_o + i, n); });
      const float mean = simd::sum(total);
      for_lanes(rows.width, [&](std::size_t i, std::size_t n) LANES_INLINE {
        store(p + i, load(p + i, n) * (load(d_p + i, n) - mean) * scale, n);
      });
    }
  }
};

struct CrossEntropy {
  [[gnu::always_inline]] static void run(float* logits, const std::uint8_t* targets, float scale,
                                         double* loss, Rows rows) {
    for (std::size_t r = 0; r < rows.count; ++r, logits += rows.width) {
      const float right = logits[targets[r]], highest = largest(logits, rows.width);
      const float total = exponentials(logits, highest, rows.width);
      *loss += std::log(static_cast<double>(total)) + static_cast<double>(highest) -
               static_cast<double>(right);
      scale_by(logits, scale / total, rows.width);
      logits[targets[r]] -= scale;
    }
  }
};

using Words [[gnu::vector_size(32)]] = std::uint32_t;
using Halves [[gnu::vector_size(16)]] = std::uint16_t;

struct FromBf16 {
  [[gnu::always_inline]] static void run(const zero::bf16* from, float* to, std::size_t count) {
    for_lanes(count, [&](std::size_t i, std::size_t n) LANES_INLINE {
      Halves halves{};
      __builtin_memcpy(&halves, &from[i].bits, n == simd::kLanes ? sizeof halves : n * 2);
      const Words words = __builtin_convertvector(halves, Words) << 16;
      __builtin_memcpy(to + i, &words, n == simd::kLanes ? sizeof words : n * 4);
    });
  }
};

struct ToBf16 {
  [[gnu::always_inline]] static void run(const float* from, zero::bf16* to, std::size_t count) {
    for_lanes(count, [&](std::size_t i, std::size_t n) LANES_INLINE {
      Words w{};
      __builtin_memcpy(&w, from + i, n == simd::kLanes ? sizeof w : n * 4);
      const Words rounded = (w + 0x7fffU + ((w >> 16) & 1U)) >> 16;
      const Words quiet = (w >> 16) | 0x40U;
      const Words out = (w & 0x7fffffffU) > 0x7f800000U ? quiet : rounded;
      const Halves halves = __builtin_convertvector(out, Halves);
      __builtin_memcpy(&to[i].bits, &halves, n == simd::kLanes ? sizeof halves : n * 2);
    });
  }
};

}  // namespace

void layer_norm(const float* x, const NormWeights& norm, float* out, Rows rows) {
  simd::dispatch<LayerNorm>(x, norm, out, rows);
}
void layer_norm_backward(const NormBackward& norm, Rows rows) {
  simd::dispatch<LayerNormBackward>(norm, rows);
}
void add_bias(float* y, const float* bias, Rows rows) {
  simd::dispatch<AddBias>(y, bias, y, rows);
}
void add_bias(const float* x, const float* bias, float* out, Rows rows) {
  simd::dispatch<AddBias>(x, bias, out, rows);
}
void bias_gelu(float* x, const float* bias, float* out, Rows rows) {
  simd::dispatch<BiasGelu>(x, bias, out, rows);
}
void split_gelu(float* x, float* out, std::size_t count) {
  simd::dispatch<SplitGelu>(x, out, count);
}
void multiply(float* x, const float* factor, float* sums, Rows rows) {
  simd::dispatch<Multiply>(x, factor, sums, rows);
}
void sum_columns(const float* x, float* sums, Rows rows) {
  simd::dispatch<SumColumns>(x, sums, rows);
}
void add_parts(const float* parts, float* out, Rows rows) {
  simd::dispatch<SumColumns>(parts, out, rows);
}
void add(float* out, const float* x, std::size_t count) {
  simd::dispatch<Add>(out, x, count);
}
void causal_softmax(float* scores, std::size_t first_query, Rows rows) {
  simd::dispatch<CausalSoftmax>(scores, first_query, rows);
}
void softmax_backward(float* p, const float* d_p, const Heads& heads, float scale, Rows rows) {
  simd::dispatch<SoftmaxBackward>(p, d_p, heads, scale, rows);
}
double cross_entropy(float* logits, const std::uint8_t* targets, float scale, Rows rows) {
  double loss = 0;
  simd::dispatch<CrossEntropy>(logits, targets, scale, &loss, rows);
  return loss;
}
void convert(std::span<const zero::bf16> from, float* to) {
  simd::dispatch<FromBf16>(from.data(), to, from.size());
}
void convert(std::span<const float> from, zero::bf16* to) {
  simd::dispatch<ToBf16>(from.data(), to, from.size());
}

}  // namespace gpt
