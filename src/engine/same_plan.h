// Compares the ranks' plans before anything is allocated.
#pragma once

#include "zero/communicator.h"
#include "zero/plan.h"

namespace zero {

// Collective, on the host.
// Throws: UsageError on all ranks, which shows the first line in which two plans differ
void require_same_plan(const Plan& plan, Bootstrap& ranks);

}  // namespace zero
