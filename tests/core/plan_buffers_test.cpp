// The buffers that a plan sizes: slots of the live arena, gradient buckets, scratch, partial sums.
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "zero/plan.h"

#include "tests/core/drawn_plan.h"
#include "tests/core/plan_oracle.h"

namespace zero {
namespace {

using ::testing::ElementsAre;

TEST(PlanBuffers, SlotsFollowTheOracleAtStage3AndAreNoneBelow) {
  testing::for_each_drawn([](const testing::DrawnPlan& d) {
    const std::vector<std::uint64_t> wanted = d.oracle.slot_bytes();
    ASSERT_EQ(d.plan.slots().size(), wanted.size());
    std::uint64_t offset = 0;
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      EXPECT_EQ(d.plan.slots()[i].bytes, wanted[i]);
      EXPECT_EQ(d.plan.slots()[i].offset, offset);
      EXPECT_EQ(offset % 256, 0U);
      offset += wanted[i];
    }
  });
}

TEST(PlanBuffers, UnitsTakeSlotsInTurnAndTiedUnitsOneOfTheirOwn) {
  ModelSpec model;
  const GroupId g = model.add_group("all");
  const auto add = [&](const char* name, std::size_t granules, GradientLife life) {
    const UnitId u = model.add_unit(name, life);
    model.add(u, "w", {granules * kGranule}, g);
    return u;
  };
  const UnitId a = add("a", 1, GradientLife::kBucket);
  const UnitId tied = add("tied", 9, GradientLife::kUntilReady);
  const UnitId b = add("b", 5, GradientLife::kBucket);
  const UnitId c = add("c", 3, GradientLife::kBucket);
  const Plan plan = make_plan(model, {.stage = Stage::kParameters, .live_units = 2}, {});
  EXPECT_EQ(plan.slot_of(a), 0U);
  EXPECT_EQ(plan.slot_of(b), 1U);
  EXPECT_EQ(plan.slot_of(c), 0U);
  EXPECT_EQ(plan.slot_of(tied), 2U);
  constexpr std::uint64_t kBytes = kGranule * sizeof(float);
  EXPECT_THAT(plan.slots(), ElementsAre(Slot{0, 3 * kBytes}, Slot{3 * kBytes, 5 * kBytes},
                                        Slot{8 * kBytes, 9 * kBytes}));
}

TEST(PlanBuffers, BucketBuffersFollowTheOracle) {
  testing::for_each_drawn([](const testing::DrawnPlan& d) {
    EXPECT_EQ(d.plan.bucket_buffer_bytes(), d.oracle.bucket_bytes());
    EXPECT_EQ(d.plan.bucket_buffer_bytes() % 256, 0U);
  });
}

TEST(PlanBuffers, ABucketHoldsTheLargestUnitAndNeverMoreThanTheModel) {
  ModelSpec model;
  const GroupId g = model.add_group("all");
  for (const std::size_t granules : {2U, 7U, 4U}) {
    model.add(model.add_unit("u" + std::to_string(granules)), "w", {granules * kGranule}, g);
  }
  constexpr std::uint64_t kBytes = kGranule * sizeof(float);
  const auto with = [&](std::size_t bucket_bytes) {
    return make_plan(model, {.bucket_bytes = bucket_bytes}, {}).bucket_buffer_bytes();
  };
  EXPECT_EQ(with(1), 7 * kBytes);
  EXPECT_EQ(with(9 * kBytes), 9 * kBytes);
  EXPECT_EQ(with(9 * kBytes + 1), 9 * kBytes + 256);
  EXPECT_EQ(with(std::size_t{1} << 40), 13 * kBytes);
  EXPECT_EQ(with(~std::size_t{0}), 13 * kBytes);
}

TEST(PlanBuffers, ScratchAndPartialSumsFollowTheOracle) {
  testing::for_each_drawn([](const testing::DrawnPlan& d) {
    EXPECT_EQ(d.plan.reduce_scratch_elements(), d.oracle.reduce_scratch());
    EXPECT_EQ(d.plan.partial_sums(), d.oracle.partial_sums());
  });
}

// Whole units in order of `ready` go into one bucket while they fit: any such run of units must
// find room for its shard in the scratch.
TEST(PlanBuffers, ScratchHoldsTheShardOfWhateverFitsIntoABucket) {
  testing::for_each_drawn([](const testing::DrawnPlan& d) {
    if (d.plan.reduce_scratch_elements() == 0) {
      return;
    }
    for (std::size_t first = 0; first < d.oracle.units.size(); ++first) {
      std::uint64_t bytes = 0, elements = 0;
      for (std::size_t u = first; u < d.oracle.units.size(); ++u) {
        const testing::OracleUnit& unit = d.oracle.units[u];
        bytes += unit.until_ready ? 0 : unit.gradient_bytes;
        for (const testing::OracleSegment& s : unit.segments) {
          elements += s.trained && !unit.until_ready ? s.elements : 0;
        }
        if (bytes <= d.plan.bucket_buffer_bytes()) {
          EXPECT_LE(elements / static_cast<std::uint64_t>(d.world),
                    d.plan.reduce_scratch_elements());
        }
      }
    }
  });
}

TEST(PlanBuffers, OnlyTheInvariantNumericsAndHigherStagesNeedScratch) {
  ModelSpec model;
  model.add(model.add_unit("u"), "w", {1000}, model.add_group("all"));
  const auto scratch = [&](Stage stage, Numerics numerics) {
    return make_plan(model, {.stage = stage, .numerics = numerics}, {.shard_ranks = 2})
        .reduce_scratch_elements();
  };
  EXPECT_EQ(scratch(Stage::kReplicated, Numerics::kFast), 0U);
  EXPECT_EQ(scratch(Stage::kStates, Numerics::kFast), 0U);
  EXPECT_EQ(scratch(Stage::kReplicated, Numerics::kStageInvariant), 512U);
  EXPECT_EQ(scratch(Stage::kGradients, Numerics::kFast), 512U);
  EXPECT_EQ(scratch(Stage::kParameters, Numerics::kFast), 512U);
  EXPECT_EQ(scratch(Stage::kParameters, Numerics::kWorldInvariant), 0U);
}

TEST(PlanBuffers, PartialSumsAreTheFloorOfTheBinaryLogarithm) {
  ModelSpec model;
  model.add(model.add_unit("u"), "w", {1000}, model.add_group("all"));
  const auto sums = [&](int micro_batches) {
    return make_plan(model,
                     {.numerics = Numerics::kWorldInvariant, .max_micro_batches = micro_batches},
                     {})
        .partial_sums();
  };
  EXPECT_EQ(sums(1), 0U);
  EXPECT_EQ(sums(2), 1U);
  EXPECT_EQ(sums(3), 1U);
  EXPECT_EQ(sums(4), 2U);
  EXPECT_EQ(sums(1023), 9U);
  EXPECT_EQ(sums(1024), 10U);
}

}  // namespace
}  // namespace zero
