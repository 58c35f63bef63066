// Starts ranks: as threads of this process.
#pragma once

#include <chrono>
#include <functional>

#include "zero/communicator.h"

namespace zero {

struct LaunchOptions {
  std::chrono::milliseconds deadline{600'000};  // of host-side meetings (split)
};

// Runs `body` on `world` threads, each with its communicator, and returns when all have ended.
// An exception on one rank is raised on the others, so that nobody waits for it.
// Throws: UsageError for world < 1; the first exception that a rank threw of its own (not those
//         that came of it)
void run_ranks(int world, const std::function<void(Communicator&)>& body, LaunchOptions = {});

}  // namespace zero
