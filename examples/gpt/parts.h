// Sums over rows made block by block: a part each, added up in order of the blocks.
#pragma once

#include <cstddef>

#include "gpt/kernels.h"
#include "gpt/layers.h"

namespace gpt {

class Parts {
 public:
  Parts(float* memory, std::size_t width) : memory_(memory), width_(width) {}
  [[nodiscard]] float* part(std::size_t block) const { return memory_ + block * width_; }
  // The sum of the first `count` parts is the gradient of `parameter`.
  void write(Gradients& gradients, zero::ParameterId parameter, std::size_t count) const {
    gradients.write(parameter, zero::Write::kOverwrite, [&](float* out) {
      add_parts(memory_, out, {count, width_});
    });
  }

 private:
  float* memory_;
  std::size_t width_;
};

}  // namespace gpt
