// What the step kernels (measure, prepare, update) read and write: plain structs in device memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "zero/dtype.h"
#include "zero/update_rule.h"

namespace zero {

// A run of one parameter's elements in this rank's arrays of one class; at most kChunkElements,
// starting at a multiple of 256 elements of the parameter.
struct Chunk {
  std::uint64_t parameter_at = 0;  // element offsets into UpdateArguments::parameters,
  std::uint64_t gradient_at = 0;   // ::gradients,
  std::uint64_t state_at = 0;      // and ::master and ::states
  std::uint64_t first = 0;         // the run's first element within the parameter
  std::uint32_t count = 0;
  std::uint32_t parameter = 0;  // row, by ParameterId
};

// One row a parameter, by ParameterId; frozen parameters have rows that nothing reads.
struct ParameterRow {
  std::int64_t step = 0;      // updates applied so far
  std::uint32_t group = 0;    // row of UpdateArguments::groups
  std::uint32_t counted = 1;  // in the norm
  std::uint32_t used = 0;     // in this step, by any rank; written by prepare
  std::uint32_t reserved = 0;
};

// What the host decides for one step; copied to the device in stream order.
struct StepInputs {
  double clip_norm = 0;  // infinity: no clipping
  double lr_scale = 1;
  std::int64_t micro_batches = 1;
  std::int64_t tokens_given = 0;  // 1: divide by the sum of tokens, 0: by W * micro_batches
};

// What prepare finds; read by update, and copied back for StepResult.
struct StepScalars {
  double divisor = 1;
  double grad_norm = 0;  // of the divided gradient, before clipping
  double clip_factor = 1;
  double lr_scale = 1;
  std::int64_t skip = 0;  // 1: a gradient is not finite (or the divisor is 0): nothing may change
  std::int64_t first_non_finite = -1;  // lowest ParameterId with a non-finite gradient, -1: none
  std::int64_t owner = -1;             // the lowest rank that found it
};

// The int64 message that is summed over ranks once a step:
// [norm bins][non-finite elements][tokens][first non-finite parameter + 1, a slot a rank]
// [used flags, three parameters a word in lanes of 21 bits: so W < 2^21].
// Source of the bins: a 672-bit fixed-point accumulator, 14 digits of 48 bits whose lowest bit is
// 2^-298, the square of the smallest fp32 subnormal.
struct ControlLayout {
  static constexpr std::size_t kBins = 14;
  static constexpr std::size_t kNonFinite = kBins;
  static constexpr std::size_t kTokens = kBins + 1;
  static constexpr std::size_t kFirstSlot = kBins + 2;
  static constexpr std::size_t kLanes = 3, kLaneBits = 21;
  [[nodiscard]] static constexpr std::size_t used_at(std::size_t world) {
    return kFirstSlot + world;
  }
  [[nodiscard]] static constexpr std::size_t words(std::size_t world, std::size_t parameters) {
    return used_at(world) + (parameters + kLanes - 1) / kLanes;
  }
};

struct UpdateArguments {
  // ---- one class on this rank
  void* parameters = nullptr;
  DType parameter_dtype = DType::kFloat32;
  const float* gradients = nullptr;  // sums over ranks and micro-batches, undivided
  float* master = nullptr;           // null: the parameter itself is fp32
  std::array<void*, 4> states{};
  const Chunk* chunks = nullptr;
  std::size_t measured_chunks = 0;  // the first ones: this rank's own part, counted in the norm
  std::size_t chunk_count = 0;      // all that this rank updates
  // ---- all classes
  ParameterRow* rows = nullptr;
  std::size_t row_count = 0;
  const Hyper* groups = nullptr;
  const StepInputs* inputs = nullptr;
  StepScalars* scalars = nullptr;
  std::int64_t* control = nullptr;
  int rank = 0, world = 1;
};

}  // namespace zero
