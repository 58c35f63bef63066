// The layers of a GPT-2, forward and backward, over plain fp32 arrays.
#pragma once

#include <cstdint>
#include <span>

#include "zero/model.h"
#include "zero/optimizer.h"

#include "gpt/model.h"
#include "gpt/pool.h"
#include "gpt/shape.h"

namespace gpt {

// The values of a unit's parameters, in fp32, while it is leased.
class Weights {
 public:
  Weights() = default;
  Weights(const Weights&) = delete;
  Weights& operator=(const Weights&) = delete;
  virtual ~Weights() = default;
  [[nodiscard]] virtual const float* values(zero::ParameterId) const = 0;
};

// Where a unit's gradients go, one parameter after the other.
class Gradients {
 public:
  Gradients() = default;
  Gradients(const Gradients&) = delete;
  Gradients& operator=(const Gradients&) = delete;
  virtual ~Gradients() = default;

  // fill(float*) writes the whole gradient (kOverwrite), or adds to it (kAdd).
  template <class Fill>
  void write(zero::ParameterId parameter, zero::Write how, Fill&& fill) {
    fill(open(parameter, how));
    close(parameter);
  }

 private:
  virtual float* open(zero::ParameterId, zero::Write) = 0;
  virtual void close(zero::ParameterId) = 0;
};

// Memory of a pass, for the most rows it may have; see workspace.h for what is where when.
struct Scratch {
  float* wide = nullptr;       // [rows, 4 width]
  float* normed = nullptr;     // [rows, width]
  float* parts = nullptr;      // [RowBlocks::kMost, 4 width]
  float* attention = nullptr;  // [threads, attention_scratch]
};

struct Pass {
  const Shape& shape;
  Batch batch;
  const Scratch& scratch;
  Pool& pool;
};

// What a block keeps for its backward, all [rows, n width].
struct BlockActivations {
  const float* x = nullptr;   // in
  float* qkv = nullptr;       // 3
  float* attended = nullptr;  // 1
  float* mid = nullptr;       // 1: x + attention
  float* hidden = nullptr;    // 4: before the GELU
  float* out = nullptr;       // 1: mid + mlp; null: not wanted
};

void block_forward(const Pass&, const BlockIds&, const Weights&, const BlockActivations&);
// `grad` [rows, width]: the gradient of out becomes that of x. qkv and hidden are used up.
void block_backward(const Pass&, const BlockIds&, const Weights&, Gradients&,
                    const BlockActivations&, float* grad);

// out [rows, width]: token plus position.
void embed(const Pass&, const float* token_table, const float* position_table,
           const std::uint8_t* tokens, float* out);
// d_token_table is added to, d_position_table [sequence, width] is stored.
void embed_backward_tokens(const Pass&, const std::uint8_t* tokens, const float* grad,
                           float* d_token_table);
void embed_backward_positions(const Pass&, const float* grad, float* d_position_table);

struct HeadWeights {
  const float *norm_weight = nullptr, *norm_bias = nullptr, *token_table = nullptr;
};
// Mean cross-entropy over the rows. Scratch::normed and `logits` (now the gradient of the mean)
// are kept for head_backward.
[[nodiscard]] double head_loss(const Pass&, const HeadWeights&, const float* x,
                               const std::uint8_t* targets, float* logits);
// Logits of one row only.
void head_logits(const Pass&, const HeadWeights&, const float* x_row, float* logits);
struct HeadGradients {
  Gradients &norm, &table;
};
// `grad` holds x and becomes its gradient. Writes the gradients of all three weights.
void head_backward(const Pass&, const GptModel&, const HeadWeights&, const HeadGradients&,
                   const float* logits, float* grad);

}  // namespace gpt
