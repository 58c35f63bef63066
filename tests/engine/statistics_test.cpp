// What the counters say, and that the bytes sent and held are those of the plan.
#include <tuple>

#include <gtest/gtest.h>

#include "tests/support/compare.h"
#include "tests/support/trainer.h"

namespace zero::testing {
namespace {

using ::testing::Combine;
using ::testing::Values;

// Six units with two precisions and a frozen part; of much the same size, so that a bucket of one
// unit has no room for two.
ModelSpec mixed_model() {
  ModelSpec model;
  const GroupId low = model.add_group("low", {.precision = kBf16WithMaster});
  const GroupId full = model.add_group("full");
  const GroupId frozen =
      model.add_group("frozen", {.precision = kBf16WithMaster, .train = Train::kFrozen});
  for (std::size_t u = 0; u < 6; ++u) {
    const std::string name = "h." + std::to_string(u);
    const UnitId unit = model.add_unit(name);
    model.add(unit, name + ".w", {40 * u + 7}, low);
    model.add(unit, name + ".b", {u}, full);
    model.add(unit, name + ".base", {33, u}, frozen);
  }
  return model;
}

// Backward goes through the units in order of forward, so that stage 3 finds none of them where
// the other pass left it and gathers each: what the plan counts.
void backward_in_order(Trainer& t, const GradientAt& at, Last last) {
  MicroBatch micro = t.optimizer().begin_micro_batch({.last = last});
  for (const UnitId unit : t.units()) {
    (void)t.optimizer().parameters(unit, kHost);
    t.write(micro, unit, at, random_gradient);
  }
}

StepResult step_in_order(Trainer& t, int step, int micro_batches, Last last = Last::kYes) {
  for (int m = 0; m < micro_batches; ++m) {
    t.forward();
    backward_in_order(t, {step, std::int64_t{m} * t.ranks().world() + t.ranks().rank(), {}},
                      m + 1 == micro_batches ? last : Last::kNo);
  }
  return t.step();
}

class StatisticsOf : public ::testing::TestWithParam<std::tuple<Stage, int>> {
 protected:
  [[nodiscard]] static Stage stage() { return std::get<0>(GetParam()); }
  [[nodiscard]] static int world() { return std::get<1>(GetParam()); }
  [[nodiscard]] static bool sums_before_it_sends(Numerics numerics) {
    return stage() <= Stage::kStates && numerics == Numerics::kFast;
  }
};

TEST_P(StatisticsOf, WireBytesAreThoseOfThePlan) {
  int compared = 0;
  for (const Numerics numerics :
       {Numerics::kFast, Numerics::kStageInvariant, Numerics::kWorldInvariant}) {
    for (const int micro_batches : {1, 3}) {
      for (const std::size_t bucket_bytes : {1U, 2049U, 1U << 20}) {
        Options options{.stage = stage(), .numerics = numerics, .max_micro_batches = 3};
        options.bucket_bytes = bucket_bytes;
        train(mixed_model(), options, world(), [&](Trainer& t) {
          (void)step_in_order(t, 0, micro_batches);
          for (int step = 1; step < 4; ++step) {
            const std::uint64_t before = t.optimizer().statistics().wire_bytes;
            const StepResult result = step_in_order(t, step, micro_batches);
            const std::uint64_t planned = t.optimizer().plan().wire_bytes_per_step(micro_batches);
            EXPECT_EQ(result.wire_bytes, planned) << "micro-batches " << micro_batches;
            EXPECT_EQ(t.optimizer().statistics().wire_bytes - before, planned);
          }
          EXPECT_EQ(t.optimizer().statistics().steps, 4U);
          EXPECT_EQ(t.optimizer().statistics().late_reductions, 0U);
        });
        ++compared;
      }
    }
  }
  EXPECT_EQ(compared, 18);
}

// Each unit on its own, and all in one bucket; stages that sum first reduce once a step.
TEST_P(StatisticsOf, ReductionsAreOneABucketAndMicroBatch) {
  for (const Numerics numerics : {Numerics::kFast, Numerics::kStageInvariant}) {
    for (const int micro_batches : {1, 3}) {
      for (const bool one_bucket : {false, true}) {
        Options options{.stage = stage(), .numerics = numerics};
        options.bucket_bytes = one_bucket ? 1U << 20 : 1;
        train(mixed_model(), options, world(), [&](Trainer& t) {
          (void)step_in_order(t, 0, micro_batches);
          (void)step_in_order(t, 1, micro_batches);
          const std::uint64_t buckets = one_bucket ? 1 : 6;
          const std::uint64_t rounds =
              sums_before_it_sends(numerics) ? 1 : static_cast<std::uint64_t>(micro_batches);
          EXPECT_EQ(t.optimizer().statistics().reductions, 2 * buckets * rounds);
        });
      }
    }
  }
}

TEST_P(StatisticsOf, ForgettingLastIsCountedAndChangesNoBit) {
  Options options{.stage = stage()};
  options.bucket_bytes = 1;
  for (const int micro_batches : {1, 3}) {
    std::uint64_t hashes[2] = {0, 1};
    for (const Last last : {Last::kNo, Last::kYes}) {
      train(mixed_model(), options, world(), [&](Trainer& t) {
        for (int step = 0; step < 3; ++step) {
          (void)step_in_order(t, step, micro_batches, last);
        }
        const bool late = sums_before_it_sends(Numerics::kFast) && last == Last::kNo;
        EXPECT_EQ(t.optimizer().statistics().late_reductions, late ? 3U * 6U : 0U);
        const std::uint64_t hash = t.optimizer().state_hash();
        if (t.ranks().rank() == 0) {
          hashes[last == Last::kYes ? 1 : 0] = hash;
        }
      });
    }
    EXPECT_EQ(hashes[0], hashes[1]) << "micro-batches " << micro_batches;
  }
}

TEST_P(StatisticsOf, GathersAreNoneBelowStage3AndOneAUnitAndPassAtIt) {
  train(mixed_model(), {.stage = stage()}, world(), [&](Trainer& t) {
    (void)step_in_order(t, 0, 2);
    const Statistics s = t.optimizer().statistics();
    EXPECT_EQ(s.gathers, stage() == Stage::kParameters ? 4U * 6U : 0U);
    if (stage() != Stage::kParameters) {
      EXPECT_EQ(s.prefetches + s.prefetch_hits + s.order_changes, 0U);
    }
  });
}

// To the byte and by category, after construction, and neither more nor other memory ever after.
TEST_P(StatisticsOf, MemoryIsThatOfThePlanFromConstructionOn) {
  Options options{.stage = stage(), .max_open_micro_batches = 2};
  options.bucket_bytes = 2049;
  const Watchdog watchdog(std::chrono::seconds(100));
  run_ranks(world(), [&](Communicator& ranks) {
    auto owned = make_cpu_backend();
    Ledger& ledger = *owned;
    const Plan plan =
        make_plan(odd_model(kBf16WithMaster), options, {.shard_ranks = ranks.world()});
    Trainer t(plan.model(), options, ranks, std::move(owned));
    const MemoryUsage after = ledger.usage();
    for (std::size_t c = 0; c < kCategoryCount; ++c) {
      const auto category = static_cast<Category>(c);
      EXPECT_EQ(after.of(category), plan.bytes(category, ranks.rank())) << name_of(category);
    }
    for (int step = 0; step < 3; ++step) {
      t.forward();
      t.backward({step, ranks.rank(), {}}, random_gradient);
      EXPECT_TRUE(t.step().applied);
    }
    EXPECT_EQ(ledger.usage().peak_bytes, plan.peak_bytes(ranks.rank()));
    EXPECT_EQ(ledger.usage().allocations, after.allocations);
  });
}

INSTANTIATE_TEST_SUITE_P(Grid, StatisticsOf,
                         Combine(Values(Stage::kReplicated, Stage::kStates, Stage::kGradients,
                                        Stage::kParameters),
                                 Values(1, 2, 3, 4, 7, 8)));

}  // namespace
}  // namespace zero::testing
