// What stands before and behind the blocks: the embedding, and the tied head with its loss.
#include <algorithm>
#include <array>

#include "gpt/gemm.h"
#include "gpt/kernels.h"
#include "gpt/layers.h"
#include "gpt/parts.h"

namespace gpt {
namespace {

// Columns that one task sums: every task sees all rows, in order.
constexpr std::size_t kColumns = 64;

template <class Task>
void for_columns(Pool& pool, std::size_t width, Task&& task) {
  pool.run((width + kColumns - 1) / kColumns, [&](std::size_t t, std::size_t) {
    const std::size_t first = t * kColumns;
    task(first, std::min(kColumns, width - first));
  });
}

Product logits_product(const float* normed, const HeadWeights& w, std::size_t width,
                       std::size_t rows, float* logits) {
  return {.a = {normed, width},
          .b = {w.token_table, width, Layout::kTransposed},
          .c = logits,
          .c_stride = kVocabulary,
          .rows = rows,
          .columns = kVocabulary,
          .inner = width};
}

void table_gradient(const Pass& pass, const float* logits, float* out) {
  const std::size_t width = pass.shape.width;
  multiply({.a = {logits, kVocabulary, Layout::kTransposed},
            .b = {pass.scratch.normed, width},
            .c = out,
            .c_stride = width,
            .rows = kVocabulary,
            .columns = width,
            .inner = pass.batch.rows()},
           pass.pool);
}

}  // namespace

void embed(const Pass& pass, const float* token_table, const float* position_table,
           const std::uint8_t* tokens, float* out) {
  const std::size_t width = pass.shape.width;
  const RowBlocks blocks(pass.batch.rows());
  pass.pool.run(blocks.count, [&](std::size_t block, std::size_t) {
    const std::size_t first = blocks.first(block);
    for (std::size_t r = first; r < first + blocks.rows_of(block); ++r) {
      add_bias(token_table + tokens[r] * width, position_table + r % pass.batch.length * width,
               out + r * width, {1, width});
    }
  });
}

void embed_backward_tokens(const Pass& pass, const std::uint8_t* tokens, const float* grad,
                           float* d_token_table) {
  const std::size_t width = pass.shape.width;
  for_columns(pass.pool, width, [&](std::size_t first, std::size_t count) {
    for (std::size_t r = 0; r < pass.batch.rows(); ++r) {
      add(d_token_table + tokens[r] * width + first, grad + r * width + first, count);
    }
  });
}

void embed_backward_positions(const Pass& pass, const float* grad, float* d_position_table) {
  const std::size_t width = pass.shape.width, length = pass.batch.length;
  std::fill(d_position_table + length * width, d_position_table + pass.shape.sequence * width,
            0.0F);
  std::copy_n(grad, length * width, d_position_table);
  for_columns(pass.pool, width, [&](std::size_t first, std::size_t count) {
    for (std::size_t r = length; r < pass.batch.rows(); ++r) {
      add(d_position_table + r % length * width + first, grad + r * width + first, count);
    }
  });
}

double head_loss(const Pass& pass, const HeadWeights& w, const float* x,
                 const std::uint8_t* targets, float* logits) {
  const std::size_t width = pass.shape.width, rows = pass.batch.rows();
  const RowBlocks blocks(rows);
  std::array<double, RowBlocks::kMost> losses{};
  const float scale = 1.0F / static_cast<float>(rows);
  pass.pool.run(blocks.count, [&](std::size_t block, std::size_t) {
    const std::size_t first = blocks.first(block), count = blocks.rows_of(block);
    layer_norm(x + first * width, {w.norm_weight, w.norm_bias}, pass.scratch.normed + first * width,
               {count, width});
    multiply_rows(logits_product(pass.scratch.normed, w, width, rows, logits), first, count);
    losses.at(block) =
        cross_entropy(logits + first * kVocabulary, targets + first, scale, {count, kVocabulary});
  });
  double loss = 0;
  for (const double part : losses) {
    loss += part;
  }
  return loss / static_cast<double>(rows);
}

void head_logits(const Pass& pass, const HeadWeights& w, const float* x_row, float* logits) {
  const std::size_t width = pass.shape.width;
  layer_norm(x_row, {w.norm_weight, w.norm_bias}, pass.scratch.normed, {1, width});
  multiply(logits_product(pass.scratch.normed, w, width, 1, logits));
}

void head_backward(const Pass& pass, const GptModel& model, const HeadWeights& w,
                   const HeadGradients& gradients, const float* logits, float* grad) {
  gradients.table.write(model.wte_weight, zero::Write::kOverwrite,
                        [&](float* out) { table_gradient(pass, logits, out); });
  const std::size_t width = pass.shape.width, rows = pass.batch.rows();
  const RowBlocks blocks(rows);
  const Parts d_weight(pass.scratch.parts, width);
  const Parts d_bias(pass.scratch.parts + RowBlocks::kMost * width, width);
  pass.pool.run(blocks.count, [&](std::size_t block, std::size_t) {
    const std::size_t first = blocks.first(block), count = blocks.rows_of(block);
    multiply_rows({.a = {logits, kVocabulary},
                   .b = {w.token_table, width},
                   .c = pass.scratch.wide,
                   .c_stride = width,
                   .rows = rows,
                   .columns = width,
                   .inner = kVocabulary},
                  first, count);
    float* x = grad + first * width;
    layer_norm_backward({.d_out = pass.scratch.wide + first * width,
                         .x = x,
                         .weight = w.norm_weight,
                         .d_x = x,
                         .into = Into::kStore,
                         .d_weight = d_weight.part(block),
                         .d_bias = d_bias.part(block)},
                        {count, width});
  });
  d_weight.write(gradients.norm, model.ln_f_weight, blocks.count);
  d_bias.write(gradients.norm, model.ln_f_bias, blocks.count);
}

}  // namespace gpt
