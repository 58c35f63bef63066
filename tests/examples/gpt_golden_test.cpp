// gpt_train against the loss curve of a PyTorch loop, at every stage and split.
#include <algorithm>

#include "tests/examples/gpt_program.h"

namespace gpt::testing {
namespace {

void expect_final_parameters(const std::string& saved) {
  const zero::SafetensorsReader found(saved), expected(golden("final.safetensors"));
  ASSERT_EQ(found.tensors().size(), expected.tensors().size());
  for (const auto& [name, info] : expected.tensors()) {
    ASSERT_TRUE(found.tensors().contains(name)) << name;
    ASSERT_EQ(found.tensors().at(name).shape, info.shape) << name;
    std::vector<double> a(info.count()), b(info.count());
    found.read(name, 0, a);
    expected.read(name, 0, b);
    double error = 0, largest = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
      error = std::max(error, std::abs(a[i] - b[i]));
      largest = std::max(largest, std::abs(b[i]));
    }
    EXPECT_LE(error, 2e-4 * largest) << name;
  }
}

void expect_curve(const std::string& log) {
  const nlohmann::json curve = nlohmann::json::parse(read_file(golden("curve.json"))).at("steps");
  const std::vector<nlohmann::json> lines = read_log(log);
  ASSERT_EQ(lines.size(), 50U);
  for (std::size_t s = 0; s < lines.size(); ++s) {
    const double norm = curve[s].at("grad_norm_fp64");
    EXPECT_EQ(lines[s].at("step"), s);
    EXPECT_EQ(lines[s].at("applied"), true);
    EXPECT_NEAR(lines[s].at("loss"), curve[s].at("loss_fp64"), 2e-5) << "step " << s;
    EXPECT_NEAR(lines[s].at("grad_norm"), norm, 3e-4 * norm) << "step " << s;
    EXPECT_NEAR(lines[s].at("lr"), curve[s].at("lr"), 1e-15) << "step " << s;
  }
}

// Returns the state's digest.
std::string expect_golden(const Split& split, int stage, const Arguments& more = {}) {
  const Folder folder;
  const std::string log = folder / "run.jsonl", save = folder / "last.safetensors";
  const Ended run =
      run_program(golden_model() + split_arguments(split) + more +
                  Arguments{"--stage", std::to_string(stage), "--init", golden("init.safetensors"),
                            "--log", log, "--save", save});
  EXPECT_EQ(run.code, 0) << run.err;
  if (run.code != 0) {
    return "";
  }
  expect_curve(log);
  expect_final_parameters(save);
  const nlohmann::json last = run.last_line();
  EXPECT_EQ(last.at("planned_peak_bytes"), last.at("ledger_peak_bytes"));
  return last.at("state_hash");
}

class GptGolden : public ::testing::TestWithParam<int> {};  // ranks

TEST_P(GptGolden, FollowsTheCurveWithTheSameBitsAtEveryStage) {
  const int ranks = GetParam();
  const Split split{.micro_batch = 8 / ranks, .micro_batches = 1, .ranks = ranks};
  const std::string hash = expect_golden(split, 0);
  EXPECT_NE(hash, "");
  for (const int stage : {1, 2, 3}) {
    EXPECT_EQ(expect_golden(split, stage), hash) << "stage " << stage;
  }
}
INSTANTIATE_TEST_SUITE_P(Ranks, GptGolden, ::testing::Values(1, 2, 4, 8));

TEST(GptGoldenSplit, FollowsTheCurveHoweverEightSequencesAreSplit) {
  int stage = 0;
  for (const Split& split : {Split{4, 2, 1}, Split{2, 4, 1}, Split{1, 8, 1}, Split{2, 2, 2},
                             Split{1, 4, 2}, Split{1, 2, 4}}) {
    expect_golden(split, stage % 4);
    ++stage;
  }
  EXPECT_EQ(stage, 6);
}

TEST(GptGoldenSplit, HasTheSameBitsAtAllWorldsAndStagesWhenAskedTo) {
  const Arguments invariant{"--numerics", "world-invariant"};
  const std::string hash = expect_golden({1, 8, 1}, 0, invariant);
  EXPECT_NE(hash, "");
  EXPECT_EQ(expect_golden({1, 4, 2}, 1, invariant), hash);
  EXPECT_EQ(expect_golden({1, 2, 4}, 2, invariant), hash);
  EXPECT_EQ(expect_golden({1, 1, 8}, 3, invariant), hash);
}

TEST(GptGoldenSplit, HasTheSameBitsWithRecomputationThreadsBucketsAndLiveUnits) {
  const Split split{2, 2, 2};
  const std::string hash = expect_golden(split, 3);
  EXPECT_NE(hash, "");
  EXPECT_EQ(expect_golden(split, 3, {"--recompute"}), hash);
  EXPECT_EQ(expect_golden(split, 3, {"--threads", "3"}), hash);
  EXPECT_EQ(expect_golden(split, 3, {"--bucket", "1KiB", "--live-units", "3"}), hash);
}

}  // namespace
}  // namespace gpt::testing
