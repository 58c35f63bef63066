// The engine against unsharded optimizers: right values in double, right bits in fp32.
#include "tests/support/oracle.h"

#include <tuple>

#include <gtest/gtest.h>

#include "tests/support/compare.h"

namespace zero::testing {
namespace {

using ::testing::Combine;
using ::testing::Values;

RunSetup odd_setup(Precision precision, int world, Stage stage) {
  RunSetup setup{.model = odd_model(precision), .world = world};
  setup.options.stage = stage;
  setup.options.bucket_bytes = 1500;
  setup.unused = [model = setup.model](const GradientAt& at) {
    return odd_model_unused(model, at);
  };
  return setup;
}

class OracleInDouble : public ::testing::TestWithParam<std::tuple<Stage, int>> {};

TEST_P(OracleInDouble, IsFollowedWithin1e5Over200Steps) {
  const auto [stage, world] = GetParam();
  RunSetup setup = odd_setup(kFloat32Only, world, stage);
  setup.steps = 200;
  setup.options.clip_norm = 2.0;
  const RunResult found = run(setup);
  const OracleResult<double> right = right_values(setup);
  ASSERT_EQ(found.steps.size(), 200U);
  EXPECT_LE(largest_error(found.master, right.master), 1e-5);
  EXPECT_LE(largest_error(found.states.at("exp_avg"), right.exp_avg), 1e-5);
  EXPECT_LE(largest_error(found.states.at("exp_avg_sq"), right.exp_avg_sq), 1e-5);
  for (std::size_t step = 0; step < 200; ++step) {
    // Each gradient is a sum of W fp32 values, rounded W - 1 times: 1e-6 bounds the norm's error.
    ASSERT_NEAR(found.steps[step].grad_norm / right.norms[step], 1, 1e-6) << "step " << step;
  }
  EXPECT_EQ(found.step_counts, right.step_counts);
}

INSTANTIATE_TEST_SUITE_P(Stages, OracleInDouble,
                         Combine(Values(Stage::kReplicated, Stage::kStates, Stage::kGradients,
                                        Stage::kParameters),
                                 Values(1, 2, 3, 4)));

enum class Clip : std::uint8_t { kNone, kAlways };

class OracleInBits : public ::testing::TestWithParam<std::tuple<Stage, int, int, Clip>> {
 protected:
  // Compares every master, copy, state and count with the oracle's, by bits.
  static void expect_bits(const RunSetup& setup) {
    const RunResult found = run(setup);
    const OracleResult<float> right = right_bits(setup);
    const bool low = setup.model.groups()[0].options.precision == kBf16WithMaster;
    for (std::size_t p = 0; p < found.master.size(); ++p) {
      ASSERT_FALSE(found.master[p].empty() && setup.model.parameters()[p].count > 0);
    }
    EXPECT_EQ("", bit_difference(setup.model, found.master, right.master));
    EXPECT_EQ("", bit_difference(setup.model, found.states.at("exp_avg"), right.exp_avg));
    EXPECT_EQ("", bit_difference(setup.model, found.states.at("exp_avg_sq"), right.exp_avg_sq));
    EXPECT_EQ("", bit_difference(setup.model, found.parameters, copies(setup.model, right.master)));
    EXPECT_EQ(found.step_counts, right.step_counts);
    EXPECT_EQ(found.steps.size(), right.norms.size());
    for (std::size_t i = 0; i < right.norms.size(); ++i) {
      // Squares of fp32 are exact in double; what is left is the rounding of their sum.
      ASSERT_NEAR(found.steps[i].grad_norm / right.norms[i], 1, 1e-14) << "step " << i;
    }
    EXPECT_TRUE(low || found.parameters == found.master);
  }
  // What the low-precision copies must be: masters rounded to nearest even, group by group.
  static Tensors copies(const ModelSpec& model, Tensors values) {
    const Tensors rounded = round_to_bf16(values);
    for (std::size_t p = 0; p < values.size(); ++p) {
      const ModelSpec::Group& group = model.groups()[index(model.parameters()[p].group)];
      if (group.options.precision.parameter == DType::kBfloat16) {
        values[p] = rounded[p];
      }
    }
    return values;
  }
};

TEST_P(OracleInBits, IsMetByFp32) {
  const auto [stage, world, micro_batches, clip] = GetParam();
  RunSetup setup = odd_setup(kFloat32Only, world, stage);
  setup.steps = 12;
  setup.micro_batches = micro_batches;
  setup.streams = world % 2 == 0 ? Streams::kCpuStream : Streams::kHostOnly;
  setup.options.clip_norm = clip == Clip::kAlways ? std::optional(0.5) : std::nullopt;
  expect_bits(setup);
}

TEST_P(OracleInBits, IsMetByBf16WithMasters) {
  const auto [stage, world, micro_batches, clip] = GetParam();
  RunSetup setup = odd_setup(kBf16WithMaster, world, stage);
  setup.steps = 12;
  setup.micro_batches = micro_batches;
  setup.streams = world % 2 == 1 ? Streams::kCpuStream : Streams::kHostOnly;
  setup.options.clip_norm = clip == Clip::kAlways ? std::optional(0.5) : std::nullopt;
  expect_bits(setup);
}

TEST_P(OracleInBits, IsMetByTheInvariantNumerics) {
  const auto [stage, world, micro_batches, clip] = GetParam();
  RunSetup setup = odd_setup(kBf16WithMaster, world, stage);
  setup.steps = 6;
  setup.micro_batches = micro_batches;
  setup.options.max_micro_batches = micro_batches + 1;
  setup.options.numerics =
      clip == Clip::kAlways ? Numerics::kWorldInvariant : Numerics::kStageInvariant;
  setup.options.clip_norm = clip == Clip::kAlways ? std::optional(0.5) : std::nullopt;
  expect_bits(setup);
}

// Hyper-parameters of each group, tokens of each rank, clipping and the rate's scale all change
// from step to step, and some steps do not clip.
TEST_P(OracleInBits, IsMetWhenEverythingChangesAtEachStep) {
  const auto [stage, world, micro_batches, clip] = GetParam();
  RunSetup setup = odd_setup(kBf16WithMaster, world, stage);
  setup.steps = 8;
  setup.micro_batches = micro_batches;
  setup.schedule = [](int step, GroupId group, Hyper& hyper) {
    hyper.lr = 1e-3 * (1 + step) / static_cast<double>(1 + index(group));
    hyper.weight_decay = 0.01 * step;
    hyper.eps = step % 2 == 0 ? 1e-8 : 1e-5;
    hyper.beta2 = step < 4 ? 0.999 : 0.9;
  };
  setup.step_options = [tokens = clip == Clip::kAlways](int step, int rank) {
    StepOptions options{.clip_norm = step % 3 == 0 ? 1e9 : 0.3, .lr_scale = 1.0 / (1 + step % 2)};
    if (tokens) {
      options.local_tokens = static_cast<std::uint64_t>(17 * rank + step + 3);
    }
    return options;
  };
  expect_bits(setup);
}

INSTANTIATE_TEST_SUITE_P(
    Grid, OracleInBits,
    Combine(Values(Stage::kReplicated, Stage::kStates, Stage::kGradients, Stage::kParameters),
            Values(1, 2, 3, 4, 7), Values(1, 3), Values(Clip::kNone, Clip::kAlways)));

// One parameter that is larger than a chunk of the update's table, so that chunks are cut.
TEST(OracleInBits, IsMetByAParameterOfManyChunks) {
  for (const int world : {1, 3}) {
    RunSetup setup{.model = plain_model({3 * kChunkElements + 77, 5}, {.weight_decay = 0.1}),
                   .world = world,
                   .steps = 3,
                   .threads = 2};
    setup.options.stage = Stage::kGradients;
    setup.options.clip_norm = 1.0;
    const RunResult found = run(setup);
    EXPECT_EQ("", bit_difference(setup.model, found.master, right_bits(setup).master)) << world;
  }
}

}  // namespace
}  // namespace zero::testing
