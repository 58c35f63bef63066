// Row-wise arithmetic of the model: fused passes over fp32 arrays, the same bits on every CPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "zero/dtype.h"

namespace gpt {

// Dense rows of `width` elements, all functions alike: arrays are [rows, width] unless said.
struct Rows {
  std::size_t count = 0, width = 0;
};

struct NormWeights {
  const float* weight = nullptr;
  const float* bias = nullptr;
};

// out = (x - mean) / sqrt(variance + 1e-5) * weight + bias.
void layer_norm(const float* x, const NormWeights& norm, float* out, Rows rows);

enum class Into : std::uint8_t { kStore, kAdd };

struct NormBackward {
  const float* d_out = nullptr;
  const float* x = nullptr;  // may be d_x with kStore
  const float* weight = nullptr;
  float* d_x = nullptr;
  Into into = Into::kAdd;
  float* d_weight = nullptr;  // [width]: stored, sums over these rows
  float* d_bias = nullptr;    // [width]: stored, sums over these rows
};
void layer_norm_backward(const NormBackward& norm, Rows rows);

// y += bias.
void add_bias(float* y, const float* bias, Rows rows);
// out = x + bias.
void add_bias(const float* x, const float* bias, float* out, Rows rows);
// x += bias, then out = gelu(x). Source: Hendrycks and Gimpel 2016, the tanh form
void bias_gelu(float* x, const float* bias, float* out, Rows rows);
// out = gelu(x) and x = gelu'(x): the activation again and all that backward needs.
void split_gelu(float* x, float* out, std::size_t count);
// x *= factor; sums [width] = the new x summed over these rows.
void multiply(float* x, const float* factor, float* sums, Rows rows);
// sums [width] = x summed over the rows.
void sum_columns(const float* x, float* sums, Rows rows);
// out = parts[0] + parts[1] + ... of `rows.width` each.
void add_parts(const float* parts, float* out, Rows rows);
// out += x.
void add(float* out, const float* x, std::size_t count);

// Row i of scores becomes the softmax of its first `first_query + i + 1` elements, 0 behind them.
void causal_softmax(float* scores, std::size_t first_query, Rows rows);

// Some rows of two [*, stride] arrays, of which `width` elements count.
struct Heads {
  const float* output = nullptr;
  const float* d_output = nullptr;
  std::size_t width = 0, stride = 0;
};
// From probabilities P and their gradient dP: P becomes scale * P * (dP - sum(d_output * output)).
void softmax_backward(float* p, const float* d_p, const Heads& heads, float scale, Rows rows);

// Logits become their gradient times `scale`. Returns the sum of -log p(target), in nats.
[[nodiscard]] double cross_entropy(float* logits, const std::uint8_t* targets, float scale,
                                   Rows rows);

void convert(std::span<const zero::bf16> from, float* to);
void convert(std::span<const float> from, zero::bf16* to);

}  // namespace gpt
