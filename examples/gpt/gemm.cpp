#include "gpt/gemm.h"

#include <algorithm>

#include <cblas.h>

namespace gpt {
namespace {

CBLAS_TRANSPOSE transposition(const Matrix& m) {
  return m.layout == Layout::kPlain ? CblasNoTrans : CblasTrans;
}

blasint as_int(std::size_t n) {
  return static_cast<blasint>(n);
}

}  // namespace

RowBlocks::RowBlocks(std::size_t rows_in) : rows(rows_in), size(0), count(0) {
  constexpr std::size_t kRound = 64;
  const std::size_t parts = std::clamp<std::size_t>(rows / kSmallest, 1, kMost);
  size = ((rows + parts - 1) / parts + kRound - 1) / kRound * kRound;
  count = (rows + size - 1) / size;
}

void use_one_blas_thread() {
  openblas_set_num_threads(1);
}

void multiply_rows(const Product& p, std::size_t first, std::size_t count) {
  const std::size_t step = p.a.layout == Layout::kPlain ? p.a.stride : 1;
  cblas_sgemm(CblasRowMajor, transposition(p.a), transposition(p.b), as_int(count),
              as_int(p.columns), as_int(p.inner), p.alpha, p.a.data + first * step,
              as_int(p.a.stride), p.b.data, as_int(p.b.stride), p.beta, p.c + first * p.c_stride,
              as_int(p.c_stride));
}

void multiply(const Product& p) {
  multiply_rows(p, 0, p.rows);
}

void multiply(const Product& p, Pool& pool) {
  if (p.rows >= p.columns) {
    const RowBlocks blocks(p.rows);
    pool.run(blocks.count, [&](std::size_t block, std::size_t) {
      multiply_rows(p, blocks.first(block), blocks.rows_of(block));
    });
    return;
  }
  const RowBlocks blocks(p.columns);
  pool.run(blocks.count, [&](std::size_t block, std::size_t) {
    Product part = p;
    const std::size_t first = blocks.first(block);
    part.b.data += first * (p.b.layout == Layout::kPlain ? 1 : p.b.stride);
    part.c += first;
    part.columns = blocks.rows_of(block);
    multiply(part);
  });
}

}  // namespace gpt
