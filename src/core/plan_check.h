// Refuses worlds, options and models of which no plan can be made.
#pragma once

#include "zero/plan.h"

namespace zero {

// Each throws UsageError: what was expected, what was found and what to do.
void check_world(const World& world);
void check_options(const Options& options);
void check_model(const ModelSpec& model);
void check_rank(const Plan& plan, int rank);

}  // namespace zero
