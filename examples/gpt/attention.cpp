#include "gpt/attention.h"

#include <algorithm>
#include <cmath>

#include "gpt/gemm.h"
#include "gpt/kernels.h"

namespace gpt {
namespace {

// Queries that are handled at once: few enough that little is spent above the diagonal.
constexpr std::size_t kQueries = 64;

// One head of one sequence.
class Head {
 public:
  Head(const Attention& a, std::size_t task, std::size_t thread)
      : length_(a.batch.length),
        width_(a.shape.head_width()),
        stride_(a.shape.width),
        wide_(3 * a.shape.width),
        at_(task / a.shape.heads * length_),
        column_(task % a.shape.heads * width_),
        scale_(1.0F / std::sqrt(static_cast<float>(width_))) {
    scores_ = a.scratch + thread * attention_scratch(a.shape);
    d_scores_ = scores_ + kQueries * a.shape.sequence;
    d_key_ = d_scores_ + kQueries * a.shape.sequence;
    d_value_ = d_key_ + a.shape.sequence * width_;
  }

  void forward(const float* qkv, float* out) const {
    for (std::size_t first = 0; first < length_; first += kQueries) {
      const std::size_t count = std::min(kQueries, length_ - first), seen = first + count;
      probabilities(qkv, first, count);
      multiply({.a = {scores_, seen},
                .b = {value(qkv), wide_},
                .c = out + narrow_at(first),
                .c_stride = stride_,
                .rows = count,
                .columns = width_,
                .inner = seen});
    }
  }

  // From the last queries to the first: the last see all keys and store, the others add.
  void backward(float* qkv, const float* out, const float* d_out) const {
    const std::size_t blocks = (length_ + kQueries - 1) / kQueries;
    for (std::size_t block = blocks; block-- > 0;) {
      const std::size_t first = block * kQueries, count = std::min(kQueries, length_ - first);
      const float beta = block + 1 == blocks ? 0.0F : 1.0F;
      probabilities(qkv, first, count);
      add_d_value(d_out, first, count, beta);
      score_gradients(qkv, out, d_out, first, count);
      add_d_key(qkv, first, count, beta);
      store_d_query(qkv, first, count);
    }
    for (std::size_t i = 0; i < length_; ++i) {
      float* row = qkv + (at_ + i) * wide_ + stride_ + column_;
      std::copy_n(d_key_ + i * width_, width_, row);
      std::copy_n(d_value_ + i * width_, width_, row + stride_);
    }
  }

 private:
  [[nodiscard]] const float* query(const float* qkv, std::size_t i) const {
    return qkv + (at_ + i) * wide_ + column_;
  }
  [[nodiscard]] const float* key(const float* qkv) const { return query(qkv, 0) + stride_; }
  [[nodiscard]] const float* value(const float* qkv) const { return query(qkv, 0) + 2 * stride_; }
  [[nodiscard]] std::size_t narrow_at(std::size_t i) const { return (at_ + i) * stride_ + column_; }

  void probabilities(const float* qkv, std::size_t first, std::size_t count) const {
    const std::size_t seen = first + count;
    multiply({.a = {query(qkv, first), wide_},
              .b = {key(qkv), wide_, Layout::kTransposed},
              .c = scores_,
              .c_stride = seen,
              .rows = count,
              .columns = seen,
              .inner = width_,
              .alpha = scale_});
    causal_softmax(scores_, first, {count, seen});
  }

  void add_d_value(const float* d_out, std::size_t first, std::size_t count, float beta) const {
    multiply({.a = {scores_, first + count, Layout::kTransposed},
              .b = {d_out + narrow_at(first), stride_},
              .c = d_value_,
              .c_stride = width_,
              .rows = first + count,
              .columns = width_,
              .inner = count,
              .beta = beta});
  }

  void score_gradients(const float* qkv, const float* out, const float* d_out, std::size_t first,
                       std::size_t count) const {
    const std::size_t seen = first + count;
    multiply({.a = {d_out + narrow_at(first), stride_},
              .b = {value(qkv), wide_, Layout::kTransposed},
              .c = d_scores_,
              .c_stride = seen,
              .rows = count,
              .columns = seen,
              .inner = width_});
    softmax_backward(scores_, d_scores_,
                     {out + narrow_at(first), d_out + narrow_at(first), width_, stride_}, scale_,
                     {count, seen});
  }

  void add_d_key(const float* qkv, std::size_t first, std::size_t count, float beta) const {
    multiply({.a = {scores_, first + count, Layout::kTransposed},
              .b = {query(qkv, first), wide_},
              .c = d_key_,
              .c_stride = width_,
              .rows = first + count,
              .columns = width_,
              .inner = count,
              .beta = beta});
  }

  void store_d_query(float* qkv, std::size_t first, std::size_t count) const {
    multiply({.a = {scores_, first + count},
              .b = {key(qkv), wide_},
              .c = qkv + (at_ + first) * wide_ + column_,
              .c_stride = wide_,
              .rows = count,
              .columns = width_,
              .inner = first + count});
  }

  std::size_t length_, width_, stride_, wide_, at_, column_;
  float scale_;
  float *scores_ = nullptr, *d_scores_ = nullptr, *d_key_ = nullptr, *d_value_ = nullptr;
};

}  // namespace

std::size_t attention_scratch(const Shape& shape) {
  return 2 * shape.sequence * (kQueries + shape.head_width());
}

void attention_forward(const Attention& a, const float* qkv, float* out, Pool& pool) {
  pool.run(a.batch.sequences * a.shape.heads,
           [&](std::size_t task, std::size_t thread) { Head(a, task, thread).forward(qkv, out); });
}

void attention_backward(const Attention& a, float* qkv, const float* out, const float* d_out,
                        Pool& pool) {
  pool.run(a.batch.sequences * a.shape.heads, [&](std::size_t task, std::size_t thread) {
    Head(a, task, thread).backward(qkv, out, d_out);
  });
}

}  // namespace gpt
