// Matrix products through CBLAS, cut into row blocks so that the thread count never shows.
#pragma once

#include <cstddef>

#include "gpt/pool.h"

namespace gpt {

enum class Layout : bool { kPlain, kTransposed };

// A row-major matrix as it lies in memory; `stride` elements from row to row.
struct Matrix {
  const float* data = nullptr;
  std::size_t stride = 0;
  Layout layout = Layout::kPlain;
};

// c [rows, columns] = alpha * a b + beta * c, a [rows, inner] and b [inner, columns] after
// their transposition.
struct Product {
  Matrix a, b;
  float* c = nullptr;
  std::size_t c_stride = 0;
  std::size_t rows = 0, columns = 0, inner = 0;
  float alpha = 1, beta = 0;
};

// How `rows` rows (or columns) are cut: a function of their number only. Each block packs the other
// factor anew, so that small blocks cost speed: 128 rows of 1024 lose 5 % to 512.
struct RowBlocks {
  explicit RowBlocks(std::size_t rows_in);
  [[nodiscard]] std::size_t first(std::size_t block) const { return block * size; }
  [[nodiscard]] std::size_t rows_of(std::size_t block) const {
    return block + 1 < count ? size : rows - block * size;
  }
  std::size_t rows, size, count;  // at most kMost blocks
  static constexpr std::size_t kMost = 8, kSmallest = 384;
};

// OpenBLAS on the calling thread only: its bits change with its own thread count.
// To be called once, before any product.
void use_one_blas_thread();

// On the calling thread.
void multiply(const Product&);
// Rows [first, first + count) of the product, on the calling thread.
void multiply_rows(const Product&, std::size_t first, std::size_t count);
// On the pool, a task a block of rows or, where there are more of them, of columns.
void multiply(const Product&, Pool& pool);

}  // namespace gpt
