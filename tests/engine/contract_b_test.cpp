// Contract B: kWorldInvariant gives the same bits at any power-of-two world; exact gradients give
// them at every world.
#include <array>
#include <set>
#include <tuple>

#include <gtest/gtest.h>

#include "tests/support/compare.h"
#include "tests/support/harness.h"

namespace zero::testing {
namespace {

using ::testing::Combine;
using ::testing::Values;

RunSetup setup_of(Precision precision, int world, Stage stage) {
  RunSetup setup{.model = odd_model(precision), .world = world};
  setup.options.stage = stage;
  setup.options.bucket_bytes = 1501;
  setup.options.clip_norm = 0.25;
  setup.unused = [model = setup.model](const GradientAt& at) {
    return odd_model_unused(model, at);
  };
  return setup;
}

class ContractB : public ::testing::TestWithParam<std::tuple<int, Precision>> {
 protected:
  // The same global micro-batches, whatever the world; `planned` beyond the need costs memory only.
  [[nodiscard]] static RunSetup world_setup(int world, Stage stage, int planned = 0) {
    const auto [global, precision] = GetParam();
    RunSetup setup = setup_of(precision, world, stage);
    setup.steps = 10;
    setup.micro_batches = global / world;
    setup.options.numerics = Numerics::kWorldInvariant;
    setup.options.max_micro_batches = setup.micro_batches + planned;
    setup.streams = world == 2 ? Streams::kCpuStream : Streams::kHostOnly;
    return setup;
  }
};

TEST_P(ContractB, GivesOneDigestAtEveryPowerOfTwoWorldAndStage) {
  const RunResult first = run(world_setup(1, Stage::kReplicated));
  for (const StepResult& step : first.steps) {
    ASSERT_GT(step.grad_norm, 0.25);  // clipping is on
  }
  int compared = 0;
  for (const int world : {1, 2, 4, 8}) {
    for (const Stage stage : kAllStages) {
      SCOPED_TRACE("world " + std::to_string(world) + ", " + stage_text(stage));
      const RunSetup setup = world_setup(world, stage, world % 3);
      const RunResult found = run(setup);
      EXPECT_EQ(found.hash, first.hash);
      EXPECT_EQ(norm_bits(found), norm_bits(first));
      EXPECT_EQ(found.seen, first.seen);
      EXPECT_EQ("", bit_difference(setup.model, found.master, first.master));
      ASSERT_FALSE(HasFailure());
      ++compared;
    }
  }
  EXPECT_EQ(compared, 16);
}

// Else the gradients could not tell the orders apart.
TEST_P(ContractB, DoesNotHoldForTheOtherNumerics) {
  std::set<std::uint64_t> hashes;
  for (const int world : {1, 4}) {
    RunSetup setup = world_setup(world, Stage::kGradients);
    setup.options.numerics = Numerics::kStageInvariant;
    hashes.insert(run(setup).hash);
  }
  EXPECT_EQ(hashes.size(), 2U);
}

// 8 is one full tree at every world; 24 leaves partial sums to fold at each (24, 12, 6 and 3
// micro-batches), and 16 has the most levels of the counter.
INSTANTIATE_TEST_SUITE_P(GlobalMicroBatches, ContractB,
                         Combine(Values(8, 16, 24), Values(kFloat32Only, kBf16WithMaster)));

constexpr int kRealMicroBatches = 8;

// Eight global micro-batches, and zeros where the last round of a world has ranks left over. The
// divisor is the sum of tokens: one of each of the eight.
RunSetup exact_setup(int world, Stage stage, Numerics numerics, Precision precision) {
  RunSetup setup = setup_of(precision, world, stage);
  setup.steps = 6;
  setup.micro_batches = (kRealMicroBatches + world - 1) / world;
  setup.options.numerics = numerics;
  setup.options.max_micro_batches = setup.micro_batches;
  setup.gradient = [](const GradientAt& at, std::span<float> out) {
    if (at.global_micro < kRealMicroBatches) {
      exact_gradient(at, out);
    } else {
      std::fill(out.begin(), out.end(), 0.0F);
    }
  };
  setup.unused = [model = setup.model](const GradientAt& at) {
    const bool real = at.global_micro < kRealMicroBatches;
    return odd_model_unused(model, real ? at : GradientAt{at.step, 1, at.parameter});
  };
  setup.step_options = [world, micro_batches = setup.micro_batches](int, int rank) {
    std::uint64_t tokens = 0;
    for (int m = 0; m < micro_batches; ++m) {
      tokens += m * world + rank < kRealMicroBatches ? 1U : 0U;
    }
    return StepOptions{.local_tokens = tokens};
  };
  return setup;
}

class ExactGradients : public ::testing::TestWithParam<std::tuple<Precision, Numerics>> {};

TEST_P(ExactGradients, GiveTheSameNormAndBitsAtEveryWorldAndStage) {
  const auto [precision, numerics] = GetParam();
  const RunResult first = run(exact_setup(8, Stage::kReplicated, numerics, precision));
  ASSERT_EQ(first.steps.size(), 6U);
  EXPECT_GT(first.steps[0].grad_norm, 0.25);
  int compared = 0;
  for (const int world : {1, 2, 3, 4, 7, 8}) {
    for (const Stage stage : kAllStages) {
      SCOPED_TRACE("world " + std::to_string(world) + ", " + stage_text(stage));
      const RunSetup setup = exact_setup(world, stage, numerics, precision);
      const RunResult found = run(setup);
      EXPECT_EQ(norm_bits(found), norm_bits(first));
      EXPECT_EQ(found.hash, first.hash);
      ASSERT_FALSE(HasFailure());
      ++compared;
    }
  }
  EXPECT_EQ(compared, 24);
}

INSTANTIATE_TEST_SUITE_P(Grid, ExactGradients,
                         Combine(Values(kFloat32Only, kBf16WithMaster),
                                 Values(Numerics::kFast, Numerics::kStageInvariant,
                                        Numerics::kWorldInvariant)));

}  // namespace
}  // namespace zero::testing
