// What prepare computes from the summed control message, once a step, in double.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "zero/host_device.h"
#include "zero/update_arguments.h"

#include "kernels/norm_math.h"

namespace zero {

ZERO_HD double divisor_of(const UpdateArguments& a) {
  if (a.inputs->tokens_given != 0) {
    return static_cast<double>(a.control[ControlLayout::kTokens]);
  }
  return static_cast<double>(a.world) * static_cast<double>(a.inputs->micro_batches);
}

// Sets first_non_finite and owner from the ranks' slots.
ZERO_HD void find_non_finite(const UpdateArguments& a, StepScalars& scalars) {
  for (int rank = 0; rank < a.world; ++rank) {
    const std::int64_t parameter =
        a.control[ControlLayout::kFirstSlot + static_cast<std::size_t>(rank)] - 1;
    if (parameter >= 0 && (scalars.owner < 0 || parameter < scalars.first_non_finite)) {
      scalars.first_non_finite = parameter;
      scalars.owner = rank;
    }
  }
}

// Carries the norm's digits in place.
ZERO_HD StepScalars find_scalars(const UpdateArguments& a) {
  StepScalars scalars;
  scalars.divisor = divisor_of(a);
  scalars.lr_scale = a.inputs->lr_scale;
  find_non_finite(a, scalars);
  if (a.control[ControlLayout::kNonFinite] != 0 || scalars.divisor == 0) {
    scalars.skip = 1;
    scalars.grad_norm = std::numeric_limits<double>::quiet_NaN();
    return scalars;
  }
  carry_digits(a.control);
  scalars.grad_norm = std::sqrt(round_digits(a.control)) / scalars.divisor;
  const double clip = a.inputs->clip_norm;
  scalars.clip_factor = scalars.grad_norm <= clip ? 1.0 : clip / (scalars.grad_norm + 1e-6);
  return scalars;
}

ZERO_HD void prepare_row(const UpdateArguments& a, std::size_t row, bool skip) {
  const std::size_t word =
      ControlLayout::used_at(static_cast<std::size_t>(a.world)) + row / ControlLayout::kLanes;
  const auto lanes = static_cast<std::uint64_t>(a.control[word]);
  constexpr std::uint64_t kLaneMask = (std::uint64_t{1} << ControlLayout::kLaneBits) - 1;
  const bool used =
      ((lanes >> (ControlLayout::kLaneBits * (row % ControlLayout::kLanes))) & kLaneMask) != 0;
  a.rows[row].used = used ? 1 : 0;
  a.rows[row].step += used && !skip ? 1 : 0;
}

}  // namespace zero
