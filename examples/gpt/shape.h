// The sizes of a model and of one micro-batch of it.
#pragma once

#include <cstddef>

namespace gpt {

inline constexpr std::size_t kVocabulary = 256;  // a token is a byte

struct Shape {
  std::size_t layers = 6, heads = 6, width = 384;
  std::size_t sequence = 256, micro_batch = 4;  // the most that a pass takes
  [[nodiscard]] std::size_t rows() const { return micro_batch * sequence; }
  [[nodiscard]] std::size_t head_width() const { return width / heads; }
};

// What one pass takes of it: `sequences` of `length` tokens.
struct Batch {
  std::size_t sequences = 0, length = 0;
  [[nodiscard]] std::size_t rows() const { return sequences * length; }
};

}  // namespace gpt
