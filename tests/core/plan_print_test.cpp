// The table that a user reads, and the refusal with what would fit.
#include <set>
#include <sstream>
#include <string>
#include <string_view>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "zero/error.h"
#include "zero/plan.h"

namespace zero {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

std::string text_of(const Plan& plan) {
  std::ostringstream out;
  out << plan;
  return out.str();
}

// Sizes that no machine's padding or alignment changes: a table that can be checked by hand.
ModelSpec small_model() {
  ModelSpec model;
  const GroupId decay = model.add_group("decay", {.precision = kBf16WithMaster});
  const GroupId plain = model.add_group("plain");
  const GroupId frozen =
      model.add_group("frozen", {.precision = kBf16WithMaster, .train = Train::kFrozen});
  model.add(model.add_unit("embed", GradientLife::kUntilReady), "wte", {1000, 64}, decay);
  for (int layer = 0; layer < 3; ++layer) {
    const UnitId h = model.add_unit("h." + std::to_string(layer));
    model.add(h, "w", {64, 300}, decay);
    model.add(h, "b", {300}, plain);
    model.add(h, "base", {64, 64}, frozen);
  }
  model.add_user_bytes("activations", 1U << 20);
  return model;
}

TEST(PlanPrint, PrintsTheTableOfStage3) {
  const Plan plan = make_plan(small_model(), {.stage = Stage::kParameters}, {.shard_ranks = 4});
  EXPECT_EQ(text_of(plan),
            "plan: stage 3 (states, gradients and parameters are sharded), 4 ranks, numerics fast\n"
            "model: 134788 elements (122500 trained) in 10 parameters, 4 units, 3 groups\n"
            "bytes of rank 0, the fullest:\n"
            "    parameters                 69.00 KiB\n"
            "    gradients                 123.00 KiB\n"
            "    master weights            120.00 KiB\n"
            "    exp_avg                   123.00 KiB\n"
            "    exp_avg_sq                123.00 KiB\n"
            "    tables                      1.02 KiB\n"
            "    activations                 1.00 MiB\n"
            "  always                        1.55 MiB\n"
            "    live units                226.00 KiB\n"
            "    gradient buckets          252.00 KiB\n"
            "    until-ready gradients     126.00 KiB\n"
            "    reduce scratch             63.00 KiB\n"
            "  while a step runs           667.00 KiB\n"
            "  peak                          2.20 MiB\n"
            "wire, sent by each rank and step: 603.28 KiB with 1 micro-batch, 1.18 MiB with 2, "
            "603.00 KiB for each one more\n");
}

TEST(PlanPrint, PrintsWhatInvariantNumericsCostOnTheWire) {
  const Plan plan =
      make_plan(small_model(), {.stage = Stage::kStates, .numerics = Numerics::kStageInvariant},
                {.shard_ranks = 4});
  EXPECT_THAT(text_of(plan),
              HasSubstr("  of this, numerics stage-invariant costs 189.00 KiB for each "
                        "micro-batch after the second\n"));
}

TEST(PlanPrint, PrintsPaddingAndPartialSumsWhereThereAreSome) {
  const Options options{
      .stage = Stage::kGradients, .numerics = Numerics::kWorldInvariant, .max_micro_batches = 4};
  const std::string text = text_of(make_plan(small_model(), options, {.shard_ranks = 4}));
  EXPECT_THAT(text, HasSubstr("    padding                    10.98 KiB\n"));
  EXPECT_THAT(text, HasSubstr("    partial sums              246.00 KiB\n"));
  EXPECT_THAT(text, Not(HasSubstr("reduce scratch")));
}

TEST(PlanPrint, FormatsBytesToThreeDigitsAtLeast) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(1023), "1023 B");
  EXPECT_EQ(format_bytes(1024), "1.00 KiB");
  EXPECT_EQ(format_bytes(1536), "1.50 KiB");
  EXPECT_EQ(format_bytes((1U << 20) - 1), "1.00 MiB");
  EXPECT_EQ(format_bytes(1U << 20), "1.00 MiB");
  EXPECT_EQ(format_bytes(std::uint64_t{3} << 29), "1.50 GiB");
  EXPECT_EQ(format_bytes(std::uint64_t{1} << 40), "1.00 TiB");
  EXPECT_EQ(format_bytes(std::uint64_t{1} << 50), "1.00 PiB");
  EXPECT_EQ(format_bytes(~std::uint64_t{0}), "16.00 EiB");
}

TEST(PlanPrint, LeavesTheStreamsFormatAlone) {
  std::ostringstream out;
  out.width(3);
  out.fill('*');
  out << std::hex << make_plan(small_model(), {}, {}) << 255;
  EXPECT_THAT(out.str(), StartsWith("plan: stage 0"));
  EXPECT_THAT(out.str(), HasSubstr("134788 elements"));
  EXPECT_THAT(out.str(), ::testing::EndsWith("ff"));
}

// The message of the refusal; empty when the plan fits.
std::string refusal(const Plan& plan, std::uint64_t device_bytes) {
  try {
    plan.require_fit(device_bytes);
  } catch (const OutOfMemory& error) {
    EXPECT_EQ(error.facts().asked_bytes, plan.peak_bytes(plan.fullest_rank()));
    EXPECT_EQ(error.facts().budget_bytes, device_bytes);
    return error.what();
  }
  return {};
}

TEST(PlanPrint, FitsIntoExactlyItsPeakAndNotIntoAByteLess) {
  for (const Stage stage :
       {Stage::kReplicated, Stage::kStates, Stage::kGradients, Stage::kParameters}) {
    const Plan plan = make_plan(small_model(), {.stage = stage}, {.shard_ranks = 3});
    const std::uint64_t peak = plan.peak_bytes(plan.fullest_rank());
    EXPECT_EQ(refusal(plan, peak), "");
    EXPECT_NE(refusal(plan, peak - 1), "");
  }
}

TEST(PlanPrint, TheRefusalHoldsTheTableAndWhatIsMissing) {
  const Plan plan = make_plan(small_model(), {}, {.shard_ranks = 4});
  const std::string message = refusal(plan, 2'500'000);
  EXPECT_THAT(message,
              StartsWith("the plan does not fit: its fullest rank needs 3.55 MiB, the device has "
                         "2.38 MiB, 1.17 MiB are missing\n" +
                         text_of(plan)));
}

TEST(PlanPrint, TheRefusalListsHigherStagesOnce) {
  const Plan plan = make_plan(small_model(), {}, {.shard_ranks = 4});
  EXPECT_THAT(refusal(plan, 2'500'000), HasSubstr("what would fit in 2.38 MiB:\n"
                                                  "  stage 1 on 4 ranks: 2.48 MiB, does not fit\n"
                                                  "  stage 2 on 4 ranks: 2.18 MiB, fits\n"
                                                  "  stage 3 on 4 ranks: 2.20 MiB, fits\n"));
  EXPECT_THAT(refusal(plan, 2'500'000),
              ::testing::EndsWith("stage 3 on 4 ranks: 2.20 MiB, fits\n"));
}

TEST(PlanPrint, TheRefusalNamesAWorldThatWouldFit) {
  const Plan plan = make_plan(small_model(), {.stage = Stage::kParameters}, {.shard_ranks = 2});
  EXPECT_THAT(refusal(plan, 2'100'000),
              ::testing::EndsWith("what would fit in 2.00 MiB:\n"
                                  "  stage 3 on 8 ranks: 1.96 MiB, fits\n"));
}

TEST(PlanPrint, TheRefusalSaysWhatIsInTheWayWhenNoWorldFits) {
  const Plan plan = make_plan(small_model(), {.stage = Stage::kParameters}, {.shard_ranks = 4});
  const std::string message = refusal(plan, 1'200'000);
  EXPECT_THAT(message, HasSubstr("  stage 3 on 16 ranks: 1.87 MiB, does not fit\n"
                                 "  no number of ranks fits at stage 3; the least is 16 ranks, "
                                 "where live units take 256.00 KiB, gradient buckets 464.00 KiB, "
                                 "the user's own bytes 1.00 MiB;"));
}

TEST(PlanPrint, NamesEachCategoryOnce) {
  std::set<std::string_view> names;
  for (std::size_t c = 0; c < kCategoryCount; ++c) {
    names.insert(name_of(static_cast<Category>(c)));
  }
  EXPECT_EQ(names.size(), kCategoryCount);
  EXPECT_FALSE(names.contains("unknown category"));
}

}  // namespace
}  // namespace zero
