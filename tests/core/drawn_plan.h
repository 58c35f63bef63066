// Random models with their plans and what the plans should be.
#pragma once

#include <string>

#include <gtest/gtest.h>

#include "zero/plan.h"

#include "tests/core/plan_oracle.h"
#include "tests/core/random_model.h"

namespace zero::testing {

inline constexpr std::uint64_t kSeeds = 150;
inline constexpr int kWorlds[] = {1, 2, 3, 4, 5, 6, 7, 8, 1000, 100'000};

// A random model, its plan and what the plan should be.
struct DrawnPlan {
  ModelSpec model;
  Options options;
  int world;
  Plan plan;
  Oracle oracle;

  explicit DrawnPlan(std::uint64_t seed) : DrawnPlan(RandomModel(seed), seed) {}

 private:
  DrawnPlan(RandomModel random, std::uint64_t seed)
      : model(random.model()),
        options(random.options()),
        world(kWorlds[seed % std::size(kWorlds)]),
        plan(make_plan(model, options, {.shard_ranks = world})),
        oracle(model, options, static_cast<std::uint64_t>(world)) {}
};

template <class Fn>
void for_each_drawn(Fn&& fn) {
  int worlds_above_8 = 0;
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const DrawnPlan drawn(seed);
    worlds_above_8 += drawn.world > 8 ? 1 : 0;
    fn(drawn);
    if (::testing::Test::HasFailure()) {
      return;
    }
  }
  ASSERT_GT(worlds_above_8, 10);
}

}  // namespace zero::testing
