// First weights, drawn or from a file, and last weights into a file.
#pragma once

#include <cstdint>
#include <string>

#include "zero/optimizer.h"

#include "gpt/model.h"
#include "gpt/settings.h"

namespace gpt {

// A good 64-bit mix of a 64-bit word. Source: Steele et al. 2014, SplitMix64
[[nodiscard]] std::uint64_t mix(std::uint64_t x);
// In [0, 1), from the high bits.
[[nodiscard]] double uniform(std::uint64_t bits);

// Throws: Refusal when the file cannot be read or its tensors are not the model's
void check_init(const std::string& path, const zero::ModelSpec& spec);

// Every rank fills what it owns: values depend on the seed, the parameter and the element only.
void initialize(zero::Optimizer& optimizer, const zero::ModelSpec& spec, const Settings& settings);

// The fp32 weights under the names and shapes of --init. Collective; rank 0 writes.
void save_weights(const zero::Optimizer& optimizer, const zero::ModelSpec& spec,
                  const std::string& path, int rank);

}  // namespace gpt
