// The layout: where every parameter starts, and which rank owns what.
#include "zero/plan.h"

#include <algorithm>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "zero/error.h"

#include "tests/core/drawn_plan.h"
#include "tests/core/plan_oracle.h"

namespace zero {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::ThrowsMessage;

std::vector<int> some_ranks(int world) {
  std::vector<int> ranks;
  for (int r = 0; r < std::min(world, 8); ++r) {
    ranks.push_back(r);
  }
  for (const int r : {world / 3, world / 2, world - 2, world - 1}) {
    ranks.push_back(std::max(r, 0));
  }
  return ranks;
}

UnitId unit(std::size_t u) {
  return static_cast<UnitId>(u);
}

TEST(Plan, LaysOutSegmentsAsTheOracleDoes) {
  testing::for_each_drawn([](const testing::DrawnPlan& d) {
    for (std::size_t u = 0; u < d.oracle.units.size(); ++u) {
      const testing::OracleUnit& wanted = d.oracle.units[u];
      const auto found = d.plan.segments(unit(u));
      ASSERT_EQ(found.size(), wanted.segments.size());
      for (std::size_t s = 0; s < found.size(); ++s) {
        EXPECT_EQ(found[s].unit, unit(u));
        EXPECT_EQ(found[s].elements, wanted.segments[s].elements);
        EXPECT_EQ(found[s].offset, wanted.segments[s].in_class);
        EXPECT_EQ(found[s].unit_bytes_at, wanted.segments[s].unit_at);
        EXPECT_EQ(found[s].gradient_bytes_at, wanted.segments[s].gradient_at);
        EXPECT_EQ(found[s].count, wanted.segments[s].parameters.size());
      }
      EXPECT_EQ(d.plan.unit_bytes(unit(u)), wanted.bytes);
      EXPECT_EQ(d.plan.gradient_bytes(unit(u)), wanted.gradient_bytes);
    }
  });
}

TEST(Plan, PlacesEachParameterInItsSegmentAtAMultipleOfTheGranule) {
  testing::for_each_drawn([](const testing::DrawnPlan& d) {
    std::size_t placed = 0;
    for (std::size_t u = 0; u < d.oracle.units.size(); ++u) {
      for (std::size_t s = 0; s < d.oracle.units[u].segments.size(); ++s) {
        const Segment& segment = d.plan.segments(unit(u))[s];
        for (std::size_t i = 0; i < segment.count; ++i, ++placed) {
          const testing::OracleParameter& wanted = d.oracle.units[u].segments[s].parameters[i];
          const ParameterId p = d.plan.layout()[segment.first + i];
          ASSERT_EQ(index(p), wanted.id);
          EXPECT_EQ(&d.plan.segments()[d.plan.place(p).segment], &segment);
          EXPECT_EQ(d.plan.place(p).offset, wanted.offset);
          EXPECT_EQ(d.plan.place(p).offset % kGranule, 0U);
        }
      }
    }
    EXPECT_EQ(placed, d.model.parameters().size());
  });
}

TEST(Plan, PadsEachSegmentToTheLeastMultipleOfWorldTimesGranule) {
  testing::for_each_drawn([](const testing::DrawnPlan& d) {
    for (const Segment& s : d.plan.segments()) {
      const std::uint64_t unit_of_padding = static_cast<std::uint64_t>(d.world) * kGranule;
      EXPECT_EQ(s.elements % unit_of_padding, 0U);
      EXPECT_EQ(s.offset % unit_of_padding, 0U);
      std::uint64_t used = 0;
      for (const ParameterId p : d.plan.layout().subspan(s.first, s.count)) {
        used += testing::padded(d.model.parameters()[index(p)].count, kGranule);
      }
      EXPECT_GE(s.elements, used);
      EXPECT_LT(s.elements, used + unit_of_padding);
    }
  });
}

TEST(Plan, ClassesHoldTheSumOfTheirSegments) {
  testing::for_each_drawn([](const testing::DrawnPlan& d) {
    ASSERT_EQ(d.plan.classes().size(), d.oracle.class_elements.size());
    std::vector<std::uint64_t> sum(d.plan.classes().size());
    for (const Segment& s : d.plan.segments()) {
      EXPECT_EQ(s.offset, sum.at(s.class_index));
      sum[s.class_index] += s.elements;
    }
    for (std::size_t c = 0; c < sum.size(); ++c) {
      EXPECT_EQ(d.plan.classes()[c].elements, sum[c]);
    }
  });
}

TEST(Plan, ExtentsAreThoseOfTheOracle) {
  testing::for_each_drawn([](const testing::DrawnPlan& d) {
    for (const int rank : some_ranks(d.world)) {
      for (std::size_t u = 0; u < d.oracle.units.size(); ++u) {
        ASSERT_EQ(d.plan.extents(rank, unit(u)),
                  d.oracle.extents(static_cast<std::uint64_t>(rank), u))
            << "rank " << rank << ", unit " << u;
      }
    }
  });
}

// For any W: each element of each parameter has exactly one owner, and the owner's shard holds it.
void expect_partition(const testing::DrawnPlan& d) {
  std::vector<std::vector<Extent>> pieces(d.model.parameters().size());
  for (int rank = 0; rank < d.world; ++rank) {
    for (std::size_t u = 0; u < d.model.units().size(); ++u) {
      std::uint64_t end = 0;
      std::uint32_t segment = 0;
      for (const Extent& e : d.plan.extents(rank, unit(u))) {
        const Segment& s = d.plan.segments()[d.plan.place(e.parameter).segment];
        const auto world = static_cast<std::uint64_t>(d.world);
        ASSERT_GE(e.offset, s.offset / world);
        ASSERT_LE(e.offset + e.count, (s.offset + s.elements) / world);
        ASSERT_TRUE(e.offset >= end || d.plan.place(e.parameter).segment != segment);
        end = e.offset + e.count;
        segment = d.plan.place(e.parameter).segment;
        pieces[index(e.parameter)].push_back(e);
      }
    }
  }
  for (std::size_t p = 0; p < pieces.size(); ++p) {
    std::uint64_t next = 0;
    for (const Extent& e : pieces[p]) {  // ranks in order own parts in order
      ASSERT_EQ(e.first, next) << "parameter " << p;
      ASSERT_GT(e.count, 0U);
      next += e.count;
    }
    ASSERT_EQ(next, d.model.parameters()[p].count) << "parameter " << p;
  }
}

TEST(Plan, ExtentsPartitionEveryParameterExactlyOnce) {
  testing::for_each_drawn([](const testing::DrawnPlan& d) {
    if (d.world <= 1000) {
      expect_partition(d);
    }
  });
  const testing::DrawnPlan largest(std::size(testing::kWorlds) - 1);
  ASSERT_EQ(largest.world, 100'000);
  expect_partition(largest);
}

TEST(Plan, ExtentsAreTheSameAtEveryStage) {
  testing::for_each_drawn([](const testing::DrawnPlan& d) {
    Options other = d.options;
    other.stage = static_cast<Stage>((static_cast<int>(other.stage) + 1) % 4);
    const Plan plan = make_plan(d.model, other, d.plan.world());
    for (std::size_t u = 0; u < d.model.units().size(); ++u) {
      EXPECT_EQ(plan.extents(d.world / 2, unit(u)), d.plan.extents(d.world / 2, unit(u)));
    }
  });
}

// Public report B002: a padding formula gave lengths that the ranks did not divide. The right
// value is ceil(N / (W * A)) * W * A for N elements; here A is the granule.
TEST(Plan, B002PaddingFollowsTheShardRule) {
  for (const std::uint64_t n : {1U, 5U, 19U, 57U}) {
    for (const int world : {2, 3, 4, 8}) {
      ModelSpec model;
      const GroupId group = model.add_group("all");
      model.add(model.add_unit("few"), "w", {n}, group);
      model.add(model.add_unit("many"), "w", {n * kGranule}, group);
      const Plan plan = make_plan(model, {}, {.shard_ranks = world});
      const auto w = static_cast<std::uint64_t>(world);
      EXPECT_EQ(plan.segments()[0].elements, w * kGranule);
      EXPECT_EQ(plan.segments()[1].elements, (n + w - 1) / w * w * kGranule);
    }
  }
}

TEST(Plan, B002PaddingOfTheReportedSizes) {
  const auto granules = [](std::uint64_t n, int world) {
    ModelSpec model;
    model.add(model.add_unit("u"), "w", {n * kGranule}, model.add_group("all"));
    return make_plan(model, {}, {.shard_ranks = world}).segments()[0].elements / kGranule;
  };
  EXPECT_EQ(granules(5, 4), 8U);
  EXPECT_EQ(granules(19, 8), 24U);
  EXPECT_EQ(granules(57, 2), 58U);
}

TEST(Plan, FrozenParametersShareAClassWhateverTheirGroup) {
  ModelSpec model;
  const GroupId a = model.add_group("a", {.rule = adam(), .train = Train::kFrozen});
  const GroupId b = model.add_group("b", {.rule = adamw(), .train = Train::kFrozen});
  const UnitId u = model.add_unit("u");
  model.add(u, "x", {300}, a);
  model.add(u, "y", {300}, b);
  const Plan plan = make_plan(model, {}, {});
  ASSERT_EQ(plan.classes().size(), 1U);
  EXPECT_EQ(plan.segments().size(), 1U);
  EXPECT_EQ(plan.gradient_bytes(u), 0U);
}

TEST(Plan, FrozenParametersLeaveNoHolesInTheGradient) {
  ModelSpec model;
  const GroupId base = model.add_group("base", {.train = Train::kFrozen});
  const GroupId lora = model.add_group("lora");
  const UnitId u = model.add_unit("u");
  for (int i = 0; i < 3; ++i) {
    model.add(u, "base" + std::to_string(i), {1000}, base);
    model.add(u, "lora" + std::to_string(i), {256}, lora);
  }
  const Plan plan = make_plan(model, {}, {});
  EXPECT_EQ(plan.gradient_bytes(u), 3 * 256 * sizeof(float));
}

TEST(Plan, GroupsThatDifferInHyperParametersOnlyShareAClass) {
  ModelSpec model;
  const GroupId decay = model.add_group("decay", {.hyper = {.weight_decay = 0.1}});
  const GroupId plain = model.add_group("plain");
  const UnitId u = model.add_unit("u");
  model.add(u, "w", {2, 2}, decay);
  model.add(u, "b", {2}, plain);
  EXPECT_EQ(make_plan(model, {}, {}).classes().size(), 1U);
}

TEST(Plan, AGroupWithoutParametersMakesNoClass) {
  ModelSpec model;
  model.add_group("empty", {.precision = kBf16WithMaster});
  model.add(model.add_unit("u"), "w", {2}, model.add_group("all"));
  const Plan plan = make_plan(model, {}, {});
  ASSERT_EQ(plan.classes().size(), 1U);
  EXPECT_EQ(plan.classes()[0].precision, kFloat32Only);
}

TEST(Plan, AUnitWithoutParametersOwnsNothing) {
  ModelSpec model;
  const UnitId empty = model.add_unit("empty");
  model.add(model.add_unit("u"), "w", {2}, model.add_group("all"));
  const Plan plan = make_plan(model, {.stage = Stage::kParameters}, {.shard_ranks = 3});
  EXPECT_THAT(plan.segments(empty), IsEmpty());
  EXPECT_THAT(plan.extents(0, empty), IsEmpty());
  EXPECT_EQ(plan.unit_bytes(empty), 0U);
  EXPECT_EQ(plan.gradient_bytes(empty), 0U);
}

TEST(Plan, AModelOfEmptyParametersHasAPlan) {
  ModelSpec model;
  const UnitId u = model.add_unit("u");
  model.add(u, "nothing", {0, 3}, model.add_group("all"));
  const Plan plan = make_plan(model, {.stage = Stage::kParameters}, {.shard_ranks = 4});
  EXPECT_EQ(plan.parameter_count(), 0U);
  EXPECT_THAT(plan.extents(3, u), IsEmpty());
  EXPECT_EQ(plan.bytes(Category::kParameters, 0), 0U);
  EXPECT_EQ(plan.chunk_counts(0, 0).updated, 0U);
}

TEST(Plan, AParameterSmallerThanTheWorldBelongsToTheFirstRank) {
  ModelSpec model;
  const UnitId u = model.add_unit("u");
  const ParameterId p = model.add(u, "w", {3}, model.add_group("all"));
  const Plan plan = make_plan(model, {}, {.shard_ranks = 7});
  EXPECT_THAT(plan.extents(0, u), ElementsAre(Extent{p, 0, 3, 0}));
  for (int rank = 1; rank < 7; ++rank) {
    EXPECT_THAT(plan.extents(rank, u), IsEmpty()) << "rank " << rank;
  }
}

TEST(Plan, RefusesRanksUnitsAndClassesOutOfRange) {
  ModelSpec model;
  model.add(model.add_unit("u"), "w", {1000}, model.add_group("all"));
  const Plan plan = make_plan(model, {}, {.shard_ranks = 2});
  EXPECT_THAT([&] { (void)plan.extents(2, UnitId{0}); },
              ThrowsMessage<UsageError>(HasSubstr("rank: expected 0 to 1, found 2")));
  EXPECT_THAT([&] { (void)plan.items(-1); },
              ThrowsMessage<UsageError>(HasSubstr("rank: expected 0 to 1, found -1")));
  EXPECT_THAT([&] { (void)plan.segments(UnitId{1}); },
              ThrowsMessage<UsageError>(HasSubstr("unit: expected one of the plan's 1, found 1")));
  EXPECT_THAT([&] { (void)plan.unit_bytes(UnitId{7}); },
              ThrowsMessage<UsageError>(HasSubstr("found 7")));
  EXPECT_THAT([&] { (void)plan.chunk_counts(0, 1); },
              ThrowsMessage<UsageError>(HasSubstr("class: expected one of the plan's 1, found 1")));
  EXPECT_THAT(
      [&] { (void)plan.place(ParameterId{1}); },
      ThrowsMessage<UsageError>(HasSubstr("parameter: expected one of the plan's 1, found 1")));
  EXPECT_THAT([&] { (void)plan.slot_of(UnitId{1}); },
              ThrowsMessage<UsageError>(HasSubstr("unit: expected one of the plan's 1, found 1")));
}

TEST(Plan, RefusesModelsThatNoSixtyFourBitsCanCount) {
  const auto plan_of = [](std::vector<std::size_t> shape, int parameters) {
    ModelSpec model;
    const GroupId group = model.add_group("all");
    for (int i = 0; i < parameters; ++i) {
      model.add(model.add_unit("u" + std::to_string(i)), "w", shape, group);
    }
    return make_plan(model, {.stage = Stage::kParameters}, {.shard_ranks = 100'000});
  };
  constexpr std::size_t kHuge = std::size_t{1} << 62;
  EXPECT_THROW((void)plan_of({kHuge}, 1), UsageError);
  EXPECT_THROW((void)plan_of({kHuge}, 2), UsageError);
  EXPECT_THROW((void)plan_of({kHuge}, 8), UsageError);
  EXPECT_THROW((void)plan_of({(std::size_t{1} << 57) + 1}, 1), UsageError);
  EXPECT_THROW((void)plan_of({std::size_t{1} << 56}, 3), UsageError);
  const Plan plan = plan_of({std::size_t{1} << 56}, 1);
  EXPECT_EQ(plan.parameter_count(), std::uint64_t{1} << 56);
  EXPECT_GT(plan.wire_bytes_per_step(3), std::uint64_t{1} << 60);
}

TEST(Plan, RefusesUserBytesAndBuffersThatOverflow) {
  ModelSpec model;
  model.add(model.add_unit("u", GradientLife::kUntilReady), "w", {std::size_t{1} << 40},
            model.add_group("all"));
  EXPECT_THROW((void)make_plan(model, {.max_open_micro_batches = 1 << 30}, {}), UsageError);
  model.add_user_bytes("activations", ~std::uint64_t{0} - 100);
  EXPECT_THAT([&] { (void)make_plan(model, {}, {}); },
              ThrowsMessage<UsageError>(HasSubstr("more bytes than 64 bits can count")));
}

}  // namespace
}  // namespace zero
