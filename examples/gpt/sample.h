// Text from the model: one byte after the other, by forward passes alone.
#pragma once

#include <cstdint>
#include <vector>

#include "gpt/gpt.h"

namespace gpt {

// `count` bytes after a line's end, drawn with a temperature of 0.8. Collective; the same bytes
// for the same weights and seed.
[[nodiscard]] std::vector<std::uint8_t> sample(Gpt& gpt, const Shape& shape, std::size_t count,
                                               std::uint64_t seed);

}  // namespace gpt
