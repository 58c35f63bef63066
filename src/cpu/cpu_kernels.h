// The CPU backend's loops over one piece of an array, on the calling thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "zero/backend.h"
#include "zero/isa.h"

#include "kernels/norm_math.h"

namespace zero::cpu {

// Elements or chunks [begin, end).
struct Range {
  std::size_t begin = 0, end = 0;
};

struct Operand {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
};
struct Source {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
};

// into (+)= from. Requires: fp32 or bf16 on either side; in place only with the same dtype
void accumulate(Isa isa, Operand into, Source from, Range range, First first);

// out = the tree sum of in. Requires: fp32, bf16 or int64; in is not empty
void sum_tree(Isa isa, void* out, std::span<const void* const> in, DType dtype, Range range);

// What one thread finds in its part of the measured chunks.
struct Measured {
  ExactSum squares;
  std::int64_t non_finite = 0;
  std::uint32_t lowest = UINT32_MAX;  // parameter with a non-finite element
};
void measure(Isa isa, const UpdateArguments& arguments, Range chunks, Measured& found);
// Adds to the control message. Not for several threads at once.
void add_to_control(const UpdateArguments& arguments, Measured& found);

void prepare(const UpdateArguments& arguments);

}  // namespace zero::cpu
