// What make_plan refuses: each message says what was expected, what was found and what to do.
#include "core/plan_check.h"

#include <chrono>
#include <cmath>
#include <limits>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "zero/error.h"

namespace zero {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

ModelSpec one_parameter(UpdateRule rule = adamw(), Train train = Train::kYes) {
  ModelSpec model;
  model.add(model.add_unit("u"), "w", {3},
            model.add_group("decay", {.rule = std::move(rule), .train = train}));
  return model;
}

// The message of the UsageError; "accepted" when there is none.
std::string refusal(const ModelSpec& model, const Options& options, World world) {
  try {
    (void)make_plan(model, options, world);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "accepted";
}
std::string refusal(const Options& options) {
  return refusal(one_parameter(), options, {});
}
std::string refusal(World world) {
  return refusal(one_parameter(), {}, world);
}
std::string refusal(UpdateRule rule) {
  return refusal(one_parameter(std::move(rule)), {}, {});
}

TEST(PlanCheck, AcceptsTheDefaults) {
  EXPECT_EQ(refusal(one_parameter(), {}, {}), "accepted");
}

TEST(PlanCheck, RefusesWorldsWithoutRanks) {
  EXPECT_EQ(refusal(World{.shard_ranks = 0}),
            "World::shard_ranks: expected at least 1, found 0; give the number of ranks, "
            "communicator.world()");
  EXPECT_THAT(refusal(World{.shard_ranks = -3}), HasSubstr("found -3"));
  EXPECT_THAT(refusal(World{.replicate_ranks = 2}),
              StartsWith("World::replicate_ranks: expected 1, found 2"));
  EXPECT_THAT(refusal(World{.replicate_ranks = 0}), HasSubstr("expected 1, found 0"));
}

TEST(PlanCheck, RefusesMoreRanksThanTheControlMessageCounts) {
  EXPECT_EQ(refusal(World{.shard_ranks = (1 << 21) - 1}), "accepted");
  EXPECT_THAT(refusal(World{.shard_ranks = 1 << 21}),
              StartsWith("World::shard_ranks: expected fewer than 2^21, found 2097152"));
  EXPECT_THAT(refusal(World{.shard_ranks = std::numeric_limits<int>::max()}),
              HasSubstr("fewer than 2^21"));
}

TEST(PlanCheck, RefusesCountsBelowOne) {
  for (const int count : {0, -1, std::numeric_limits<int>::min()}) {
    const std::string found = ": expected at least 1, found " + std::to_string(count);
    EXPECT_THAT(refusal(Options{.live_units = count}), StartsWith("Options::live_units" + found));
    EXPECT_THAT(refusal(Options{.buckets = count}), StartsWith("Options::buckets" + found));
    EXPECT_THAT(refusal(Options{.max_open_micro_batches = count}),
                StartsWith("Options::max_open_micro_batches" + found));
    EXPECT_THAT(refusal(Options{.max_micro_batches = count}),
                StartsWith("Options::max_micro_batches" + found));
  }
  EXPECT_THAT(refusal(Options{.bucket_bytes = 0}),
              StartsWith("Options::bucket_bytes: expected at least 1, found 0"));
  EXPECT_THAT(refusal(Options{.deadline = std::chrono::milliseconds(0)}),
              StartsWith("Options::deadline: expected more than 0 ms, found 0"));
}

TEST(PlanCheck, RefusesClipNormsThatAreNotFiniteOrNotAboveZero) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (const double clip : {0.0, -1.0, kInfinity, -kInfinity, std::nan("")}) {
    EXPECT_THAT(refusal(Options{.clip_norm = clip}),
                StartsWith("Options::clip_norm: expected a finite number above 0, found "));
  }
  EXPECT_EQ(refusal(Options{.clip_norm = std::numeric_limits<double>::denorm_min()}), "accepted");
  EXPECT_EQ(refusal(Options{.clip_norm = std::nullopt}), "accepted");
}

TEST(PlanCheck, RefusesNumbersThatAreNoEnumerator) {
  EXPECT_THAT(refusal(Options{.stage = static_cast<Stage>(4)}),
              StartsWith("Options::stage: expected 0 to 3, found 4"));
  EXPECT_THAT(refusal(Options{.numerics = static_cast<Numerics>(3)}),
              StartsWith("Options::numerics: expected 0 to 2, found 3"));
  EXPECT_THAT(refusal(World{.transport = static_cast<Transport>(3)}),
              StartsWith("World::transport: expected 0 to 2, found 3"));
}

TEST(PlanCheck, RefusesModelsWithoutUnitsOrParameters) {
  ModelSpec model;
  EXPECT_EQ(refusal(model, {}, {}),
            "model: expected at least one unit, found none; call ModelSpec::add_unit before "
            "make_plan");
  model.add_unit("u");
  EXPECT_EQ(refusal(model, {}, {}),
            "model: expected at least one parameter, found none; call ModelSpec::add before "
            "make_plan");
}

TEST(PlanCheck, RefusesRulesWithoutAFunction) {
  UpdateRule rule = adamw();
  rule.cpu = nullptr;
  rule.cuda = nullptr;
  EXPECT_THAT(refusal(rule),
              AllOf(StartsWith("group \"decay\", rule \"adamw\": expected a function for the CPU"),
                    HasSubstr("set UpdateRule::cpu")));
}

TEST(PlanCheck, RefusesRulesThatNeedMoreThanOnePass) {
  UpdateRule rule = adamw();
  for (const Between between : {Between::kParameterSums, Between::kWholeParameter}) {
    rule.between = between;
    EXPECT_THAT(refusal(rule), HasSubstr("expected Between::kNothing"));
  }
}

TEST(PlanCheck, RefusesStatesThatThisBuildDoesNotCarry) {
  UpdateRule rule = adamw();
  rule.states.push_back({"more"});
  rule.states.push_back({"most"});
  EXPECT_EQ(refusal(rule), "accepted");
  rule.states.back().name = "more";
  EXPECT_THAT(refusal(rule), HasSubstr("a name of its own for each state, found two called"));
  rule.states.push_back({"fifth"});
  EXPECT_THAT(refusal(rule), HasSubstr("expected at most 4 states, found 5"));
  rule = adamw();
  rule.states[1].dtype = DType::kUint8;
  EXPECT_THAT(refusal(rule),
              HasSubstr("rule \"adamw\", state \"exp_avg_sq\": expected fp32, found uint8"));
  rule = adamw();
  rule.states[0].elements_per_value = 256;
  EXPECT_THAT(refusal(rule), HasSubstr("expected one element per value, found 256"));
}

TEST(PlanCheck, TheRuleOfAFrozenGroupDoesNotMatter) {
  EXPECT_EQ(refusal(one_parameter({}, Train::kFrozen), {}, {}), "accepted");
}

}  // namespace
}  // namespace zero
