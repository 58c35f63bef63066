// The bytes that a plan promises, by category, and the bytes that a step sends.
#include <algorithm>
#include <map>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "zero/error.h"
#include "zero/plan.h"
#include "zero/update_arguments.h"

#include "tests/core/plan_oracle.h"
#include "tests/core/random_model.h"

namespace zero {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr Category kCategories[] = {
    Category::kParameters, Category::kGradients, Category::kMaster,
    Category::kStates,     Category::kPadding,   Category::kLiveUnits,
    Category::kBuckets,    Category::kScratch,   Category::kUser,
};
static_assert(std::size(kCategories) == kCategoryCount);

template <class Fn>
void for_each_seed(Fn&& fn) {
  constexpr int kWorlds[] = {1, 2, 3, 4, 7, 8, 1000};
  int plans = 0;
  for (std::uint64_t seed = 0; seed < 150; ++seed, ++plans) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    testing::RandomModel random(seed);
    const ModelSpec model = random.model();
    const Options options = random.options();
    const int world = kWorlds[seed % std::size(kWorlds)];
    fn(make_plan(model, options, {.shard_ranks = world}),
       testing::Oracle(model, options, static_cast<std::uint64_t>(world)));
    if (::testing::Test::HasFailure()) {
      return;
    }
  }
  ASSERT_EQ(plans, 150);
}

std::set<int> some_ranks(int world) {
  return {0, world / 3, world / 2, std::max(0, world - 2), world - 1};
}

TEST(PlanMemory, BytesOfEachCategoryAreThoseOfTheOracle) {
  for_each_seed([](const Plan& plan, const testing::Oracle& oracle) {
    for (const int rank : some_ranks(plan.world().shard_ranks)) {
      std::map<Category, std::uint64_t> wanted = oracle.bytes(static_cast<std::uint64_t>(rank));
      for (const Category category : kCategories) {
        EXPECT_EQ(plan.bytes(category, rank), wanted[category])
            << name_of(category) << ", rank " << rank;
      }
    }
  });
}

TEST(PlanMemory, PeakIsTheSumOfTheItemsAndPersistentOfThoseThatStay) {
  for_each_seed([](const Plan& plan, const testing::Oracle&) {
    for (const int rank : some_ranks(plan.world().shard_ranks)) {
      std::uint64_t all = 0, stay = 0;
      for (const PlanItem& item : plan.items(rank)) {
        EXPECT_GT(item.bytes, 0U) << item.name;
        all += item.bytes;
        stay += item.transient ? 0 : item.bytes;
      }
      EXPECT_EQ(plan.peak_bytes(rank), all);
      EXPECT_EQ(plan.persistent_bytes(rank), stay);
      std::uint64_t by_category = 0;
      for (const Category category : kCategories) {
        by_category += plan.bytes(category, rank);
      }
      EXPECT_EQ(by_category, all);
    }
  });
}

TEST(PlanMemory, NoTwoItemsHaveTheSameNameAndCategory) {
  for_each_seed([](const Plan& plan, const testing::Oracle&) {
    std::set<std::pair<std::string, Category>> seen;
    for (const PlanItem& item : plan.items(0)) {
      EXPECT_TRUE(seen.emplace(item.name, item.category).second) << item.name;
    }
  });
}

TEST(PlanMemory, FullestRankIsTheLowestWithTheHighestPeak) {
  int not_first = 0;
  for_each_seed([&](const Plan& plan, const testing::Oracle&) {
    if (plan.world().shard_ranks > 8) {
      return;
    }
    int fullest = 0;
    for (int rank = 1; rank < plan.world().shard_ranks; ++rank) {
      fullest = plan.peak_bytes(rank) > plan.peak_bytes(fullest) ? rank : fullest;
    }
    EXPECT_EQ(plan.fullest_rank(), fullest);
    not_first += fullest > 0 ? 1 : 0;
  });
  EXPECT_GT(not_first, 1);
}

TEST(PlanMemory, FullestRankOfALargeWorldIsFoundWhereSmallParametersCrowd) {
  ModelSpec model;
  const GroupId group = model.add_group("all");
  const UnitId u = model.add_unit("u");
  model.add(u, "large", {kGranule * 1000 * 900}, group);
  for (int i = 0; i < 100; ++i) {
    model.add(u, "small" + std::to_string(i), {1}, group);
  }
  // 900,100 granules over 1000 ranks: 901 each, so `large` ends in rank 998.
  const Plan plan = make_plan(model, {.stage = Stage::kStates}, {.shard_ranks = 1000});
  EXPECT_EQ(plan.fullest_rank(), 998);
  EXPECT_GT(plan.peak_bytes(998), plan.peak_bytes(997));
  EXPECT_GT(plan.peak_bytes(998), plan.peak_bytes(999));
}

// Ranks differ in their chunk tables only: arrays have equal shards, padding included.
TEST(PlanMemory, RanksDifferInTheirTablesOnly) {
  for_each_seed([](const Plan& plan, const testing::Oracle&) {
    const auto without_scratch = [&](int rank) {
      return plan.peak_bytes(rank) - plan.bytes(Category::kScratch, rank);
    };
    for (const int rank : some_ranks(plan.world().shard_ranks)) {
      EXPECT_EQ(without_scratch(rank), without_scratch(0));
    }
  });
}

// A model without padding: P elements that every world of the test divides into granules.
constexpr std::uint64_t kElements = std::uint64_t{1} << 20;

Plan plain_plan(Stage stage, int world, Precision precision, Options options = {}) {
  ModelSpec model;
  const GroupId group = model.add_group("all", {.precision = precision});
  for (int u = 0; u < 4; ++u) {
    model.add(model.add_unit("u" + std::to_string(u)), "w", {kElements / 4}, group);
  }
  options.stage = stage;
  return make_plan(model, options, {.shard_ranks = world});
}

constexpr Stage kStages[] = {Stage::kReplicated, Stage::kStates, Stage::kGradients,
                             Stage::kParameters};

TEST(PlanMemory, BytesPerTrainedParameterFollowTheFormula) {
  struct Case {
    Precision precision;
    std::uint64_t parameter, gradient, rest;
  };
  for (const Case& c : {Case{kFloat32Only, 4, 4, 8}, Case{kBf16WithMaster, 2, 4, 12}}) {
    for (const std::uint64_t world : {1U, 2U, 4U, 8U}) {
      for (const Stage stage : kStages) {
        const Plan plan = plain_plan(stage, static_cast<int>(world), c.precision);
        const int s = static_cast<int>(stage);
        const std::uint64_t parameters = kElements * c.parameter / (s >= 3 ? world : 1);
        const std::uint64_t gradients = kElements * c.gradient / (s >= 2 ? world : 1);
        const std::uint64_t rest = kElements * c.rest / (s >= 1 ? world : 1);
        EXPECT_EQ(plan.bytes(Category::kParameters, 0), parameters);
        EXPECT_EQ(plan.bytes(Category::kGradients, 0), gradients);
        EXPECT_EQ(plan.bytes(Category::kMaster, 0) + plan.bytes(Category::kStates, 0), rest);
        EXPECT_EQ(plan.bytes(Category::kPadding, 0), 0U);
        EXPECT_EQ(plan.formula_bytes(Category::kParameters), parameters);
        EXPECT_EQ(plan.formula_bytes(Category::kGradients), gradients);
        EXPECT_EQ(plan.formula_bytes(Category::kMaster) + plan.formula_bytes(Category::kStates),
                  rest);
      }
    }
  }
}

TEST(PlanMemory, TheFormulaHasNoBuffers) {
  const Plan plan = plain_plan(Stage::kParameters, 2, kFloat32Only);
  for (const Category category : {Category::kPadding, Category::kLiveUnits, Category::kBuckets,
                                  Category::kScratch, Category::kUser}) {
    EXPECT_EQ(plan.formula_bytes(category), 0U) << name_of(category);
  }
}

TEST(PlanMemory, TheFormulaRoundsUpWhenTheWorldDoesNotDivide) {
  ModelSpec model;
  model.add(model.add_unit("u"), "w", {5}, model.add_group("all"));
  const Plan plan = make_plan(model, {.stage = Stage::kParameters}, {.shard_ranks = 3});
  EXPECT_EQ(plan.formula_bytes(Category::kParameters), 7U);  // 20 / 3
  EXPECT_EQ(plan.formula_bytes(Category::kStates), 14U);     // 40 / 3
}

TEST(PlanMemory, FrozenParametersCostParameterBytesOnly) {
  ModelSpec model;
  model.add(model.add_unit("u"), "w", {4096},
            model.add_group("all", {.precision = kBf16WithMaster, .train = Train::kFrozen}));
  const Plan plan = make_plan(model, {}, {.shard_ranks = 2});
  EXPECT_EQ(plan.bytes(Category::kParameters, 0), 2 * 4096U);
  EXPECT_EQ(plan.trained_count(), 0U);
  EXPECT_EQ(plan.parameter_count(), 4096U);
  for (const Category category : {Category::kGradients, Category::kMaster, Category::kStates,
                                  Category::kPadding, Category::kBuckets}) {
    EXPECT_EQ(plan.bytes(category, 0), 0U) << name_of(category);
    EXPECT_EQ(plan.formula_bytes(category), 0U) << name_of(category);
  }
}

// Public report B020: a higher stage needed more memory than a lower one. Persistent bytes must be
// those of the formula plus padding, and the rest a documented number of buffers.
TEST(PlanMemory, B020HigherStagesNeedNoMore) {
  constexpr std::uint64_t kBucket = 1U << 18;
  for (const std::uint64_t world : {1U, 2U, 4U}) {
    std::uint64_t persistent_before = 0;
    for (const Stage stage : kStages) {
      const Plan plan = plain_plan(stage, static_cast<int>(world), kBf16WithMaster,
                                   {.live_units = 2, .buckets = 2, .bucket_bytes = kBucket});
      const std::uint64_t wanted[] = {18 * kElements, 6 * kElements + 12 * kElements / world,
                                      2 * kElements + 16 * kElements / world,
                                      18 * kElements / world};
      std::uint64_t tables = 0, buffers = 0;
      for (const PlanItem& item : plan.items(0)) {
        tables += item.name == "tables" ? item.bytes : 0;
        buffers += item.transient ? item.bytes : 0;
      }
      const std::uint64_t persistent = plan.persistent_bytes(0);
      EXPECT_EQ(persistent - tables, wanted[static_cast<std::size_t>(stage)]);
      EXPECT_LT(tables, wanted[3] / 100);
      EXPECT_TRUE(stage == Stage::kReplicated || persistent <= persistent_before);
      persistent_before = persistent;
      constexpr std::uint64_t kUnit = kElements / 4 * 2;  // bytes of the largest unit, bf16
      const std::uint64_t bucket = std::max(kBucket, kUnit);
      const std::uint64_t scratch = stage >= Stage::kGradients ? bucket / 2 * 4 / world : 0;
      const std::uint64_t live = stage == Stage::kParameters ? 2 * kUnit : 0;
      EXPECT_EQ(buffers, 2 * bucket + live + scratch);
      EXPECT_EQ(plan.peak_bytes(0), persistent + buffers);
    }
  }
}

TEST(PlanMemory, B020PaddingIsLessThanWorldTimesGranuleForEachSegment) {
  for_each_seed([](const Plan& plan, const testing::Oracle&) {
    // Each parameter may leave a granule less one element, each segment W granules less one, in
    // arrays of at most 4 + 4 + 4 + 3 * 4 bytes an element.
    const auto world = static_cast<std::uint64_t>(plan.world().shard_ranks);
    const std::uint64_t most =
        kGranule * (plan.model().parameters().size() + plan.segments().size() * world) * 24;
    EXPECT_LE(plan.bytes(Category::kPadding, 0), most);
  });
}

// What one rank sends of arrays of P elements of `size` bytes: a ring's (W-1)/W.
std::uint64_t sent(std::uint64_t size, std::uint64_t world) {
  return kElements * size / world * (world - 1);
}

std::uint64_t control(const Plan& plan, std::uint64_t world) {
  const std::uint64_t words = 16 + world + (plan.model().parameters().size() + 2) / 3;
  return 2 * words * 8 * (world - 1) / world;
}

// Public report B144: users expected one exchange a step at every stage. Stages 0 and 1 reduce once
// (in fp32 when micro-batches were summed before), 2 and 3 for each micro-batch.
TEST(PlanMemory, B144WireBytesFollowTheFormulaOfEachStageAndNumerics) {
  for (const Precision precision : {kFloat32Only, kBf16WithMaster}) {
    const std::uint64_t g = bytes_of(precision.gradient), p = bytes_of(precision.parameter);
    for (const std::uint64_t world : {1U, 2U, 4U, 8U}) {
      for (const std::uint64_t k : {1U, 2U, 4U}) {
        for (const Numerics numerics :
             {Numerics::kFast, Numerics::kStageInvariant, Numerics::kWorldInvariant}) {
          const bool fast = numerics == Numerics::kFast;
          const std::uint64_t once = k == 1 ? g : 4;
          const std::uint64_t reduce = fast ? once : k * g;
          const std::uint64_t wanted[] = {reduce + 4, reduce + p, k * g + p, k * g + 2 * k * p};
          for (const Stage stage : kStages) {
            const Plan plan = plain_plan(stage, static_cast<int>(world), precision,
                                         {.numerics = numerics, .max_micro_batches = 4});
            EXPECT_EQ(plan.wire_bytes_per_step(static_cast<int>(k)),
                      sent(wanted[static_cast<std::size_t>(stage)], world) + control(plan, world))
                << "stage " << static_cast<int>(stage) << ", world " << world << ", " << k
                << " micro-batches, " << name_of(numerics);
          }
        }
      }
    }
  }
}

TEST(PlanMemory, FrozenParametersAreSentAtStage3Only) {
  ModelSpec model;
  model.add(model.add_unit("u"), "w", {kElements},
            model.add_group("all", {.train = Train::kFrozen}));
  for (const Stage stage : kStages) {
    const Plan plan = make_plan(model, {.stage = stage}, {.shard_ranks = 2});
    const std::uint64_t gathers = stage == Stage::kParameters ? sent(2 * 3 * 4, 2) : 0;
    EXPECT_EQ(plan.wire_bytes_per_step(3), gathers + control(plan, 2));
  }
}

TEST(PlanMemory, OneRankSendsNothing) {
  for (const Stage stage : kStages) {
    EXPECT_EQ(plain_plan(stage, 1, kFloat32Only).wire_bytes_per_step(5), 0U);
  }
}

TEST(PlanMemory, RefusesAStepWithoutMicroBatches) {
  const Plan plan = plain_plan(Stage::kStates, 2, kFloat32Only);
  EXPECT_THAT([&] { (void)plan.wire_bytes_per_step(0); },
              ThrowsMessage<UsageError>(HasSubstr("micro_batches: expected at least 1, found 0")));
}

TEST(PlanMemory, CountsOfElementsHaveNoPadding) {
  ModelSpec model;
  const UnitId u = model.add_unit("u");
  model.add(u, "w", {3, 5}, model.add_group("trained"));
  model.add(u, "scalar", {}, model.add_group("frozen", {.train = Train::kFrozen}));
  model.add(u, "empty", {0, 7}, GroupId{0});
  const Plan plan = make_plan(model, {}, {.shard_ranks = 8});
  EXPECT_EQ(plan.parameter_count(), 16U);
  EXPECT_EQ(plan.trained_count(), 15U);
}

TEST(PlanMemory, UserBytesAreItemsOfTheirOwnNames) {
  ModelSpec model;
  model.add(model.add_unit("u"), "w", {3}, model.add_group("all"));
  model.add_user_bytes("activations", 1000);
  model.add_user_bytes("logits", 500);
  model.add_user_bytes("activations", 24);
  const Plan plan = make_plan(model, {}, {});
  EXPECT_EQ(plan.bytes(Category::kUser, 0), 1524U);
  std::map<std::string, std::uint64_t> user;
  for (const PlanItem& item : plan.items(0)) {
    if (item.category == Category::kUser) {
      user[item.name] = item.bytes;
    }
  }
  EXPECT_EQ(user, (std::map<std::string, std::uint64_t>{{"activations", 1024}, {"logits", 500}}));
}

}  // namespace
}  // namespace zero
