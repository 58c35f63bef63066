// Contract A: at one world the bits depend on neither stage, bucket size, live units nor threads.
#include <array>
#include <tuple>

#include <gtest/gtest.h>

#include "tests/support/compare.h"
#include "tests/support/harness.h"

namespace zero::testing {
namespace {

using ::testing::Combine;
using ::testing::Values;

// Options that may change nothing: each unit alone, odd groups, the whole model in one, and many
// buffers with all units live.
struct Grouping {
  std::size_t bucket_bytes;
  int buckets, live_units;
  Streams streams;
};
constexpr std::array kGroupings{
    Grouping{1, 1, 1, Streams::kHostOnly}, Grouping{1501, 2, 2, Streams::kCpuStream},
    Grouping{1U << 30, 1, 3, Streams::kHostOnly}, Grouping{4099, 3, 8, Streams::kCpuStream}};

struct Variant {
  Stage stage;
  Grouping grouping;
  int threads;
};

RunSetup setup_of(Precision precision, int world, int micro_batches, const Variant& variant) {
  RunSetup setup{.model = odd_model(precision),
                 .world = world,
                 .micro_batches = micro_batches,
                 .steps = 50,
                 .threads = variant.threads,
                 .streams = variant.grouping.streams};
  setup.options.stage = variant.stage;
  setup.options.numerics = micro_batches == 1 ? Numerics::kFast : Numerics::kStageInvariant;
  setup.options.bucket_bytes = variant.grouping.bucket_bytes;
  setup.options.buckets = variant.grouping.buckets;
  setup.options.live_units = variant.grouping.live_units;
  setup.options.clip_norm = 2.0;
  setup.unused = [model = setup.model](const GradientAt& at) {
    return odd_model_unused(model, at);
  };
  return setup;
}

std::string describe(const Variant& v) {
  return stage_text(v.stage) + ", bucket_bytes " + std::to_string(v.grouping.bucket_bytes) +
         ", buckets " + std::to_string(v.grouping.buckets) + ", live_units " +
         std::to_string(v.grouping.live_units) + ", threads " + std::to_string(v.threads);
}

// All variants of an ordinary run, each grouping and thread count at half of the stages; the long
// form takes the whole product.
std::vector<Variant> variants() {
  std::vector<Variant> out;
  for (std::size_t s = 0; s < kAllStages.size(); ++s) {
    for (std::size_t g = 0; g < kGroupings.size(); ++g) {
      for (const int threads : {1, 2}) {
        const bool ordinary = (s + g) % 2 == 0 && static_cast<std::size_t>(threads) == 1 + g / 2;
        if (ordinary || asked_for_all()) {
          out.push_back({kAllStages[s], kGroupings[g], threads});
        }
      }
    }
  }
  return out;
}

class ContractA : public ::testing::TestWithParam<std::tuple<int, Precision, int>> {};

// 8 variants in each of 24 instances: 192 of the grid's 768 combinations.
TEST_P(ContractA, GivesOneDigestAtEveryStageAndGrouping) {
  const auto [world, precision, micro_batches] = GetParam();
  ASSERT_EQ(variants().size(), asked_for_all() ? 32U : 8U);
  std::optional<RunResult> first;
  for (const Variant& variant : variants()) {
    SCOPED_TRACE(describe(variant));
    const RunSetup setup = setup_of(precision, world, micro_batches, variant);
    RunResult found = run(setup);
    ASSERT_EQ(found.steps.size(), 50U);
    if (!first) {
      first = std::move(found);
      continue;
    }
    EXPECT_EQ(found.hash, first->hash);
    EXPECT_EQ(norm_bits(found), norm_bits(*first));
    EXPECT_EQ(found.seen, first->seen);
    EXPECT_EQ(found.step_counts, first->step_counts);
    EXPECT_EQ("", bit_difference(setup.model, found.master, first->master));
    ASSERT_FALSE(HasFailure());
  }
  ASSERT_TRUE(first.has_value());
  EXPECT_TRUE(first->steps.back().applied);
}

INSTANTIATE_TEST_SUITE_P(Grid, ContractA,
                         Combine(Values(1, 2, 3, 4, 7, 8), Values(kFloat32Only, kBf16WithMaster),
                                 Values(1, 3)));

class ContractAOfOneMicroBatch : public ::testing::TestWithParam<int> {};

TEST_P(ContractAOfOneMicroBatch, HoldsForAllNumerics) {
  std::vector<std::uint64_t> hashes;
  for (const Stage stage : kAllStages) {
    for (const Numerics numerics :
         {Numerics::kFast, Numerics::kStageInvariant, Numerics::kWorldInvariant}) {
      RunSetup setup = setup_of(kBf16WithMaster, GetParam(), 1, {stage, kGroupings[1], 1});
      setup.steps = 10;
      setup.options.numerics = numerics;
      setup.options.max_micro_batches = 4;
      hashes.push_back(run(setup).hash);
    }
  }
  EXPECT_EQ(hashes, std::vector<std::uint64_t>(12, hashes[0]));
}

INSTANTIATE_TEST_SUITE_P(Worlds, ContractAOfOneMicroBatch, Values(1, 2, 3, 4, 7, 8));

class FastNumerics : public ::testing::TestWithParam<std::tuple<int, Precision>> {
 protected:
  [[nodiscard]] static RunResult run_fast(Stage stage, std::size_t grouping) {
    const auto [world, precision] = GetParam();
    RunSetup setup = setup_of(precision, world, 3, {stage, kGroupings.at(grouping), 1});
    setup.steps = 20;
    setup.options.numerics = Numerics::kFast;
    return run(setup);
  }
};

TEST_P(FastNumerics, GiveTheSameBitsWithinStages0And1AndWithin2And3) {
  const std::uint64_t low = run_fast(Stage::kReplicated, 0).hash;
  const std::uint64_t high = run_fast(Stage::kGradients, 0).hash;
  for (std::size_t grouping = 0; grouping < kGroupings.size(); ++grouping) {
    EXPECT_EQ(run_fast(Stage::kReplicated, grouping).hash, low) << grouping;
    EXPECT_EQ(run_fast(Stage::kStates, grouping).hash, low) << grouping;
    EXPECT_EQ(run_fast(Stage::kGradients, grouping).hash, high) << grouping;
    EXPECT_EQ(run_fast(Stage::kParameters, grouping).hash, high) << grouping;
  }
}

// Else these gradients could not tell one order of summation from another, and the contract's
// tests would hold for any.
TEST_P(FastNumerics, SumInAnOrderOfTheirOwnBetweenTheTwoPairsOfStages) {
  if (std::get<0>(GetParam()) > 1) {
    EXPECT_NE(run_fast(Stage::kStates, 0).hash, run_fast(Stage::kGradients, 0).hash);
  } else {
    EXPECT_EQ(run_fast(Stage::kStates, 0).hash, run_fast(Stage::kGradients, 0).hash);
  }
}

INSTANTIATE_TEST_SUITE_P(Grid, FastNumerics,
                         Combine(Values(1, 2, 3, 4), Values(kFloat32Only, kBf16WithMaster)));

}  // namespace
}  // namespace zero::testing
