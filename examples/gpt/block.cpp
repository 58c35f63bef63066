// A transformer block. Between two meetings of the pool each task takes its rows through as many
// operations as it can, while they are in its cache.
#include "gpt/attention.h"
#include "gpt/gemm.h"
#include "gpt/kernels.h"
#include "gpt/layers.h"
#include "gpt/parts.h"

namespace gpt {
namespace {

class Block {
 public:
  Block(const Pass& pass, const BlockIds& ids, const Weights& weights, const BlockActivations& a)
      : pass_(pass),
        ids_(ids),
        weights_(weights),
        a_(a),
        width_(pass.shape.width),
        blocks_(pass.batch.rows()) {}

  void forward() const {
    pass_.pool.run(blocks_.count, [&](std::size_t block, std::size_t) {
      normalise(a_.x, ids_.ln_1_weight, ids_.ln_1_bias, block);
      float* qkv = a_.qkv + blocks_.first(block) * 3 * width_;
      times(pass_.scratch.normed, ids_.c_attn_weight, {width_, 3 * width_}, a_.qkv, block, 0);
      add_bias(qkv, weights_.values(ids_.c_attn_bias), rows(block, 3 * width_));
    });
    attention_forward(attention(), a_.qkv, a_.attended, pass_.pool);
    pass_.pool.run(blocks_.count, [&](std::size_t block, std::size_t) { forward_rows(block); });
  }

  void backward(Gradients& gradients, float* grad) const {
    backward_mlp(gradients, grad);
    backward_attention(gradients, grad);
  }

 private:
  struct Sizes {
    std::size_t in = 0, out = 0;
  };
  [[nodiscard]] Rows rows(std::size_t block, std::size_t width) const {
    return {blocks_.rows_of(block), width};
  }
  [[nodiscard]] Attention attention() const {
    return {pass_.shape, pass_.batch, pass_.scratch.attention};
  }

  void normalise(const float* x, zero::ParameterId weight, zero::ParameterId bias,
                 std::size_t block) const {
    const std::size_t at = blocks_.first(block) * width_;
    layer_norm(x + at, {weights_.values(weight), weights_.values(bias)}, pass_.scratch.normed + at,
               rows(block, width_));
  }

  // Rows of out = x W + beta * out.
  void times(const float* x, zero::ParameterId weight, Sizes sizes, float* out, std::size_t block,
             float beta) const {
    multiply_rows({.a = {x, sizes.in},
                   .b = {weights_.values(weight), sizes.out},
                   .c = out,
                   .c_stride = sizes.out,
                   .rows = blocks_.rows,
                   .columns = sizes.out,
                   .inner = sizes.in,
                   .beta = beta},
                  blocks_.first(block), blocks_.rows_of(block));
  }

  // Rows of out = d_y W^T.
  void times_transposed(const float* d_y, zero::ParameterId weight, Sizes sizes, float* out,
                        std::size_t block) const {
    multiply_rows({.a = {d_y, sizes.out},
                   .b = {weights_.values(weight), sizes.out, Layout::kTransposed},
                   .c = out,
                   .c_stride = sizes.in,
                   .rows = blocks_.rows,
                   .columns = sizes.in,
                   .inner = sizes.out},
                  blocks_.first(block), blocks_.rows_of(block));
  }

  // The gradient of W in y = x W.
  void weight_gradient(Gradients& gradients, zero::ParameterId weight, const float* x,
                       const float* d_y, Sizes sizes) const {
    gradients.write(weight, zero::Write::kOverwrite, [&](float* out) {
      multiply({.a = {x, sizes.in, Layout::kTransposed},
                .b = {d_y, sizes.out},
                .c = out,
                .c_stride = sizes.out,
                .rows = sizes.in,
                .columns = sizes.out,
                .inner = blocks_.rows},
               pass_.pool);
    });
  }

  void forward_rows(std::size_t block) const {
    const std::size_t at = blocks_.first(block) * width_;
    const Rows narrow = rows(block, width_), wide = rows(block, 4 * width_);
    float *mid = a_.mid + at, *hidden = a_.hidden + 4 * at, *active = pass_.scratch.wide + 4 * at;
    add_bias(a_.x + at, weights_.values(ids_.attn_proj_bias), mid, narrow);
    times(a_.attended, ids_.attn_proj_weight, {width_, width_}, a_.mid, block, 1);
    normalise(a_.mid, ids_.ln_2_weight, ids_.ln_2_bias, block);
    times(pass_.scratch.normed, ids_.c_fc_weight, {width_, 4 * width_}, a_.hidden, block, 0);
    bias_gelu(hidden, weights_.values(ids_.c_fc_bias), active, wide);
    if (a_.out != nullptr) {
      add_bias(mid, weights_.values(ids_.mlp_proj_bias), a_.out + at, narrow);
      times(pass_.scratch.wide, ids_.mlp_proj_weight, {4 * width_, width_}, a_.out, block, 1);
    }
  }

  void backward_mlp(Gradients& gradients, float* grad) const {
    float* wide = pass_.scratch.wide;
    const Parts d_bias(pass_.scratch.parts, width_), d_hidden(pass_.scratch.parts, 4 * width_);
    pass_.pool.run(blocks_.count, [&](std::size_t block, std::size_t) {
      const std::size_t at = blocks_.first(block) * width_;
      split_gelu(a_.hidden + 4 * at, wide + 4 * at, blocks_.rows_of(block) * 4 * width_);
      sum_columns(grad + at, d_bias.part(block), rows(block, width_));
    });
    d_bias.write(gradients, ids_.mlp_proj_bias, blocks_.count);
    weight_gradient(gradients, ids_.mlp_proj_weight, wide, grad, {4 * width_, width_});
    pass_.pool.run(blocks_.count, [&](std::size_t block, std::size_t) {
      const std::size_t at = blocks_.first(block) * 4 * width_;
      times_transposed(grad, ids_.mlp_proj_weight, {4 * width_, width_}, wide, block);
      multiply(a_.hidden + at, wide + at, d_hidden.part(block), rows(block, 4 * width_));
      normalise(a_.mid, ids_.ln_2_weight, ids_.ln_2_bias, block);
    });
    d_hidden.write(gradients, ids_.c_fc_bias, blocks_.count);
    weight_gradient(gradients, ids_.c_fc_weight, pass_.scratch.normed, a_.hidden,
                    {width_, 4 * width_});
    backward_norm({gradients, ids_.c_fc_weight, ids_.ln_2_weight, ids_.ln_2_bias}, a_.hidden,
                  {width_, 4 * width_}, a_.mid, grad);
  }

  void backward_attention(Gradients& gradients, float* grad) const {
    const Parts d_proj(pass_.scratch.parts, width_), d_qkv(pass_.scratch.parts, 3 * width_);
    float* d_attended = pass_.scratch.wide;
    weight_gradient(gradients, ids_.attn_proj_weight, a_.attended, grad, {width_, width_});
    pass_.pool.run(blocks_.count, [&](std::size_t block, std::size_t) {
      sum_columns(grad + blocks_.first(block) * width_, d_proj.part(block), rows(block, width_));
      times_transposed(grad, ids_.attn_proj_weight, {width_, width_}, d_attended, block);
      normalise(a_.x, ids_.ln_1_weight, ids_.ln_1_bias, block);
    });
    d_proj.write(gradients, ids_.attn_proj_bias, blocks_.count);
    attention_backward(attention(), a_.qkv, a_.attended, d_attended, pass_.pool);
    pass_.pool.run(blocks_.count, [&](std::size_t block, std::size_t) {
      sum_columns(a_.qkv + blocks_.first(block) * 3 * width_, d_qkv.part(block),
                  rows(block, 3 * width_));
    });
    d_qkv.write(gradients, ids_.c_attn_bias, blocks_.count);
    weight_gradient(gradients, ids_.c_attn_weight, pass_.scratch.normed, a_.qkv,
                    {width_, 3 * width_});
    backward_norm({gradients, ids_.c_attn_weight, ids_.ln_1_weight, ids_.ln_1_bias}, a_.qkv,
                  {width_, 3 * width_}, a_.x, grad);
  }

  struct NormIds {
    Gradients& gradients;
    zero::ParameterId product, weight, bias;
  };

  // Through y = layer_norm(x) W: adds the gradient of x to `grad`.
  void backward_norm(const NormIds& ids, const float* d_y, Sizes sizes, const float* x,
                     float* grad) const {
    float* d_normed = pass_.scratch.wide;
    const Parts d_weight(pass_.scratch.parts, width_);
    const Parts d_bias(pass_.scratch.parts + RowBlocks::kMost * width_, width_);
    pass_.pool.run(blocks_.count, [&](std::size_t block, std::size_t) {
      const std::size_t at = blocks_.first(block) * width_;
      times_transposed(d_y, ids.product, sizes, d_normed, block);
      layer_norm_backward({.d_out = d_normed + at,
                           .x = x + at,
                           .weight = weights_.values(ids.weight),
                           .d_x = grad + at,
                           .into = Into::kAdd,
                           .d_weight = d_weight.part(block),
                           .d_bias = d_bias.part(block)},
                          rows(block, width_));
    });
    d_weight.write(ids.gradients, ids.weight, blocks_.count);
    d_bias.write(ids.gradients, ids.bias, blocks_.count);
  }

  const Pass& pass_;
  const BlockIds& ids_;
  const Weights& weights_;
  const BlockActivations& a_;
  std::size_t width_;
  RowBlocks blocks_;
};

}  // namespace

void block_forward(const Pass& pass, const BlockIds& ids, const Weights& weights,
                   const BlockActivations& activations) {
  Block(pass, ids, weights, activations).forward();
}

void block_backward(const Pass& pass, const BlockIds& ids, const Weights& weights,
                    Gradients& gradients, const BlockActivations& activations, float* grad) {
  Block(pass, ids, weights, activations).backward(gradients, grad);
}

}  // namespace gpt
