// Refuses worlds, options and models of which no plan can be made.
#pragma once

#include "zero/plan.h"

namespace zero {

// Each throws UsageError: what was expected, what was found and what to do.
// `what` is "set() of group 'decay'", for the message.
void check_hyper(const std::string& what, const Hyper& hyper);
void check_world(const World& world);
void check_options(const Options& options);
void check_model(const ModelSpec& model);
// `what` is "unit", ...; ids of it count from 0 to `end`, exclusive.
void check_id(std::size_t found, std::size_t end, std::string_view what);
void check_rank(const Plan& plan, int rank);

}  // namespace zero
