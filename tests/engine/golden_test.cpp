// Trajectories of PyTorch: first the oracles, then the engine at every stage.
#include "tests/support/golden.h"

#include <tuple>

#include <gtest/gtest.h>

#include "tests/support/compare.h"

namespace zero::testing {
namespace {

using ::testing::Combine;
using ::testing::Values;
using ::testing::ValuesIn;

// Every Adam of the index that needs neither fp16 nor a loss scale.
std::vector<std::string> adam_cases() {
  std::vector<std::string> out;
  const nlohmann::json cases = golden_index();
  for (const auto& [name, json] : cases.items()) {
    if (name.starts_with("adam") && json.at("scaler").is_null()) {
      out.push_back(name);
    }
  }
  return out;
}

TEST(Golden, HasTheSixAdamCases) {
  EXPECT_EQ(adam_cases(),
            (std::vector<std::string>{"adam_l2", "adamw", "adamw_accumulate", "adamw_bf16_master",
                                      "adamw_clip", "adamw_groups"}));
}

class Golden : public ::testing::TestWithParam<std::tuple<std::string, int>> {
 protected:
  [[nodiscard]] static GoldenCase load() { return load_golden(std::get<0>(GetParam())); }
  [[nodiscard]] static int world() { return std::get<1>(GetParam()); }
};

// The reference is PyTorch's fp64 run: only the order of operations differs.
TEST_P(Golden, IsMetByTheOracleInDouble) {
  const GoldenCase golden = load();
  const OracleResult<double> found =
      right_values(golden_setup(golden, world(), Stage::kReplicated));
  ASSERT_EQ(found.snapshots.size(), 7U);
  for (const auto& [step, values] : found.snapshots) {
    for (std::size_t p = 0; p < values.size(); ++p) {
      EXPECT_LE(relative_error<double>(values[p], golden.checked.at(step)[p]), 1e-12);
    }
  }
  for (std::size_t step = 0; step < golden.norms.size(); ++step) {
    EXPECT_NEAR(found.norms[step] / golden.norms[step], 1, 1e-12);
  }
}

TEST_P(Golden, IsMetByTheOracleInTheLibrarysArithmetic) {
  const GoldenCase golden = load();
  const OracleResult<float> found = right_bits(golden_setup(golden, world(), Stage::kGradients));
  ASSERT_EQ(found.snapshots.size(), 7U);
  for (const auto& [step, values] : found.snapshots) {
    EXPECT_LE(largest_error(values, golden.checked.at(step)), golden.tolerance) << "step " << step;
  }
}

TEST_P(Golden, IsMetByTheEngineAtEveryStage) {
  const GoldenCase golden = load();
  int stages = 0;
  for (const Stage stage :
       {Stage::kReplicated, Stage::kStates, Stage::kGradients, Stage::kParameters}) {
    SCOPED_TRACE("stage " + std::to_string(static_cast<int>(stage)));
    const RunSetup setup = golden_setup(golden, world(), stage);
    const RunResult found = run(setup);
    ASSERT_EQ(found.snapshots.size(), 7U);
    for (const auto& [step, values] : found.snapshots) {
      EXPECT_LE(largest_error(values, golden.checked.at(step)), golden.tolerance)
          << "step " << step;
    }
    ASSERT_EQ(found.steps.size(), golden.norms.size());
    for (std::size_t step = 0; step < golden.norms.size(); ++step) {
      EXPECT_TRUE(found.steps[step].applied);
      // Means of exact multiples: at most a rounding per addition of micro-batches.
      EXPECT_NEAR(found.steps[step].grad_norm / golden.norms[step], 1, 4e-7) << "step " << step;
    }
    // States are sums of forty terms, of which some cancel: four times the parameters' tolerance.
    for (const auto& [state, values] : golden.states) {
      EXPECT_LE(largest_error(found.states.at(state), values), 4 * golden.tolerance) << state;
    }
    const bool low = golden.precision == kBf16WithMaster;
    EXPECT_EQ("", bit_difference(setup.model, found.parameters,
                                 low ? round_to_bf16(found.master) : found.master));
    ++stages;
  }
  EXPECT_EQ(stages, 4);
}

INSTANTIATE_TEST_SUITE_P(Cases, Golden, Combine(ValuesIn(adam_cases()), Values(1, 3, 4)));

}  // namespace
}  // namespace zero::testing
