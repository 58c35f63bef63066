// The CPU backend: a stand-in for a device, with asynchronous streams and a byte budget.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>

#include "zero/ledger.h"

namespace zero {

inline constexpr std::uint64_t kUnlimited = std::numeric_limits<std::uint64_t>::max();

// `threads` compute threads run the kernels (never more bits than one: results do not depend on
// it); each stream is a thread besides.
// Throws: UsageError for threads < 1
[[nodiscard]] std::unique_ptr<Ledger> make_cpu_backend(std::uint64_t budget_bytes = kUnlimited,
                                                       int threads = 1);

}  // namespace zero
