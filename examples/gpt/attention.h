// Causal self-attention over heads that lie interleaved in rows of [query | key | value].
#pragma once

#include <cstddef>

#include "gpt/pool.h"
#include "gpt/shape.h"

namespace gpt {

// Elements of scratch memory that each thread of the pool needs.
[[nodiscard]] std::size_t attention_scratch(const Shape& shape);

struct Attention {
  const Shape& shape;
  Batch batch;
  float* scratch = nullptr;  // [threads, attention_scratch]
};

// Shapes: qkv [rows, 3 width], out [rows, width]
void attention_forward(const Attention&, const float* qkv, float* out, Pool& pool);

// The gradient of qkv takes the place of qkv; probabilities are computed again.
// Shapes: qkv [rows, 3 width], out and d_out [rows, width]
void attention_backward(const Attention&, float* qkv, const float* out, const float* d_out,
                        Pool& pool);

}  // namespace gpt
