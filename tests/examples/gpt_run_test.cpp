// What a run of gpt_train leaves: the log, the last line, the memory table, weights and samples.
#include <algorithm>
#include <array>
#include <bit>

#include <gmock/gmock.h>

#include "tests/examples/gpt_program.h"

namespace gpt::testing {
namespace {

using ::testing::HasSubstr;

const std::array<const char*, 9> kCategories{"parameters",       "gradients", "master_weights",
                                             "optimizer_states", "padding",   "live_units",
                                             "gradient_buckets", "scratch",   "user"};

Ended small_run(const Arguments& more, int steps = 3) {
  const Ended run = run_program(golden_model(steps) + more);
  EXPECT_EQ(run.code, 0) << run.err;
  EXPECT_EQ(run.err, "");
  return run;
}

struct MemoryCase {
  const char* precision;
  const char* numerics;
  Arguments more;
};

class GptMemory : public ::testing::TestWithParam<int> {};  // stage

TEST_P(GptMemory, PlansWhatTheLedgerMeasuresToTheByte) {
  const std::string stage = std::to_string(GetParam());
  int runs = 0;
  for (const MemoryCase& c :
       {MemoryCase{"fp32", "fast", {}}, MemoryCase{"fp32", "fast", {"--recompute"}},
        MemoryCase{"fp32", "stage-invariant", {"--threads", "2"}}, MemoryCase{"bf16", "fast", {}},
        MemoryCase{"bf16", "fast", {"--recompute"}},
        MemoryCase{"bf16", "world-invariant", {"--live-units", "3"}}}) {
    for (const char* ranks : {"1", "3"}) {
      const Ended run = small_run(Arguments{"--stage", stage, "--ranks", ranks, "--micro-batch",
                                            "2", "--micro-batches", "2", "--precision", c.precision,
                                            "--numerics", c.numerics, "--sample", "3"} +
                                  c.more);
      const nlohmann::json last = run.last_line();
      EXPECT_EQ(last.at("planned_peak_bytes"), last.at("ledger_peak_bytes")) << run.out;
      EXPECT_EQ(run.out.find("differs"), std::string::npos) << run.out;
      ++runs;
    }
  }
  EXPECT_EQ(runs, 12);
}
INSTANTIATE_TEST_SUITE_P(Stages, GptMemory, ::testing::Range(0, 4));

TEST(GptRun, FitsExactlyTheBudgetThatItPlans) {
  const Arguments world{"--stage", "3", "--ranks", "2"};
  const std::uint64_t peak = small_run(world).last_line().at("planned_peak_bytes");
  small_run(world + Arguments{"--device-memory", std::to_string(peak)});
  EXPECT_EQ(
      run_program(golden_model(3) + world + Arguments{"--device-memory", std::to_string(peak - 1)})
          .code,
      2);
}

TEST(GptRun, NeedsFewerBytesWithRecomputationAndHigherStages) {
  const auto peak = [](const Arguments& more) {
    return small_run(more + Arguments{"--ranks", "4", "--bucket", "1KiB"})
        .last_line()
        .at("ledger_peak_bytes")
        .get<std::uint64_t>();
  };
  const std::uint64_t all = peak({"--stage", "0"}), states = peak({"--stage", "1"});
  const std::uint64_t gradients = peak({"--stage", "2"});
  EXPECT_GT(all, states);
  EXPECT_GT(states, gradients);
  EXPECT_GT(gradients, peak({"--stage", "2", "--recompute"}));
}

TEST(GptRun, LogsOneObjectAStep) {
  const Folder folder;
  const std::string log = folder / "run.jsonl";
  const Ended run = small_run({"--stage", "2", "--ranks", "2", "--log", log}, 5);
  const std::vector<nlohmann::json> lines = read_log(log);
  ASSERT_EQ(lines.size(), 5U);
  for (std::size_t s = 0; s < lines.size(); ++s) {
    const nlohmann::json& line = lines[s];
    EXPECT_EQ(line.at("step"), s);
    EXPECT_EQ(line.at("applied"), true);
    for (const char* number : {"loss", "grad_norm", "lr", "tokens_per_second", "step_ms"}) {
      EXPECT_TRUE(line.at(number).is_number()) << number;
      EXPECT_GT(line.at(number), 0) << number;
    }
    ASSERT_EQ(line.at("bytes").size(), kCategories.size());
    for (const char* category : kCategories) {
      const nlohmann::json& bytes = line.at("bytes").at(category);
      EXPECT_GE(bytes.at("peak"), bytes.at("current")) << category;
    }
    EXPECT_GT(line.at("bytes").at("user").at("current"), 0);
  }
  EXPECT_EQ(run.last_line().at("first_loss"), lines.front().at("loss"));
  EXPECT_EQ(run.last_line().at("last_loss"), lines.back().at("loss"));
}

TEST(GptRun, EndsWithTheTableAndOneObject) {
  const Ended run = small_run({"--stage", "3", "--ranks", "2", "--precision", "bf16"});
  const nlohmann::json last = run.last_line();
  for (const char* number : {"tokens_per_second", "planned_peak_bytes", "ledger_peak_bytes",
                             "resident_peak_bytes", "first_loss", "last_loss"}) {
    EXPECT_TRUE(last.at(number).is_number()) << number;
  }
  EXPECT_EQ(last.at("state_hash").get<std::string>().size(), 16U);
  EXPECT_GT(last.at("resident_peak_bytes"), last.at("ledger_peak_bytes"));
  EXPECT_THAT(run.out, HasSubstr("master weights"));
  EXPECT_THAT(run.out, HasSubstr("step 1/3  loss 5."));
  // 120,576 parameters: 2 + 4 + (4 + 8) bytes each, over two ranks.
  for (const char* bytes : {"120576", "241152", "482304"}) {
    EXPECT_THAT(run.out, HasSubstr(bytes));
  }
}

TEST(GptRun, LogsTheNormBeforeClippingAndWithoutClippingToo) {
  const Folder folder;
  const std::string clipped = folder / "clipped.jsonl", free = folder / "free.jsonl";
  EXPECT_EQ(run_program(golden_model(1, "0.01") + Arguments{"--log", clipped}).code, 0);
  EXPECT_EQ(run_program(golden_model(1, "0") + Arguments{"--log", free}).code, 0);
  EXPECT_EQ(read_log(clipped).at(0).at("grad_norm"), read_log(free).at(0).at("grad_norm"));
  EXPECT_GT(read_log(free).at(0).at("grad_norm"), 1);
}

TEST(GptRun, SkipsStepsOfAModelThatIsNotFinite) {
  const Folder folder;
  const std::string init = folder / "init.safetensors", log = folder / "run.jsonl";
  const zero::SafetensorsReader reader(golden("init.safetensors"));
  std::vector<zero::SafetensorsWriter::Entry> entries;
  for (const auto& [name, info] : reader.tensors()) {
    entries.push_back({name, info.shape});
  }
  zero::SafetensorsWriter writer(init, entries);
  for (const auto& [name, info] : reader.tensors()) {
    std::vector<float> values(info.count());
    reader.read(name, 0, values);
    values[0] = name == "h.1.mlp.c_fc.bias" ? std::nanf("") : values[0];
    writer.write(name, 0, values);
  }
  writer.finish();
  const Ended run = run_program(
      golden_model(2) + Arguments{"--init", init, "--log", log, "--ranks", "2", "--stage", "3"});
  EXPECT_EQ(run.code, 0);
  EXPECT_THAT(run.err, HasSubstr("2 of 2 steps were skipped"));
  EXPECT_EQ(run.last_line().at("skipped_steps"), 2);
  const std::vector<nlohmann::json> lines = read_log(log);
  ASSERT_EQ(lines.size(), 2U);
  for (const nlohmann::json& line : lines) {
    EXPECT_EQ(line.at("applied"), false);
    EXPECT_TRUE(line.at("grad_norm").is_null());
    EXPECT_TRUE(line.at("loss").is_null());
  }
  EXPECT_TRUE(run.last_line().at("last_loss").is_null());
}

TEST(GptRun, SavesWhatItReadsWhenThereIsNothingToDo) {
  const Folder folder;
  int cases = 0;
  for (const Arguments& more :
       {Arguments{"--stage", "3", "--ranks", "3"}, Arguments{"--precision", "bf16"},
        Arguments{"--precision", "bf16", "--stage", "2", "--ranks", "2"}}) {
    const std::string saved = folder / ("saved" + std::to_string(cases++));
    const Ended run =
        small_run(more + Arguments{"--init", golden("init.safetensors"), "--save", saved}, 0);
    EXPECT_TRUE(run.last_line().at("first_loss").is_null());
    const zero::SafetensorsReader a(golden("init.safetensors")), b(saved);
    ASSERT_EQ(a.tensors().size(), b.tensors().size());
    for (const auto& [name, info] : a.tensors()) {
      ASSERT_EQ(b.tensors().at(name).shape, info.shape) << name;
      EXPECT_EQ(b.tensors().at(name).type, zero::TensorType::kFloat32) << name;
      std::vector<float> before(info.count()), after(info.count());
      a.read(name, 0, before);
      b.read(name, 0, after);
      EXPECT_EQ(std::memcmp(before.data(), after.data(), before.size() * sizeof(float)), 0) << name;
    }
  }
  EXPECT_EQ(cases, 3);
}

TEST(GptRun, GoesOnFromWhatItSaved) {
  const Folder folder;
  const std::string saved = folder / "saved", log = folder / "run.jsonl";
  const double last = small_run({"--save", saved}, 6).last_line().at("last_loss");
  small_run({"--init", saved, "--log", log, "--stage", "3", "--ranks", "2"}, 1);
  EXPECT_LT(read_log(log).at(0).at("loss"), last);
}

TEST(GptRun, DrawsTheFirstWeightsFromTheSeedAlone) {
  const auto hash = [](const Arguments& more) {
    return small_run(more, 0).last_line().at("state_hash").get<std::string>();
  };
  const std::string first = hash({"--seed", "7"});
  EXPECT_EQ(hash({"--seed", "7", "--ranks", "3", "--stage", "3"}), first);
  EXPECT_NE(hash({"--seed", "8"}), first);
  const double loss = small_run({}, 1).last_line().at("first_loss");
  EXPECT_NEAR(loss, std::log(256.0), 0.3);
}

TEST(GptRun, SamplesTheSameBytesAtEveryStageAndChangesNoBit) {
  const auto text_of = [](const Ended& run) {
    const std::size_t from = run.out.find("---- sample\n");
    return run.out.substr(from, run.out.find("\n----\n", from) - from);
  };
  const Arguments world{"--ranks", "2", "--numerics", "stage-invariant"};
  const Ended none = small_run(world);
  const Ended first = small_run(world + Arguments{"--sample", "100"});
  const Ended other =
      small_run(world + Arguments{"--sample", "100", "--stage", "3", "--sample-every", "1"});
  EXPECT_EQ(text_of(first).size(), std::string("---- sample\n").size() + 100);
  EXPECT_EQ(other.out.find("---- sample"), other.out.find("---- sample", 1));
  EXPECT_NE(other.out.find("---- sample", other.out.find("---- sample") + 1), std::string::npos);
  EXPECT_THAT(other.out, HasSubstr(text_of(first)));
  EXPECT_EQ(none.last_line().at("state_hash"), first.last_line().at("state_hash"));
  EXPECT_EQ(none.last_line().at("state_hash"), other.last_line().at("state_hash"));
}

TEST(GptRun, HasTheSameBitsWithAnyThreadsAtOddSizes) {
  std::string hash;
  for (const char* threads : {"1", "2", "5"}) {
    const Ended run = run_program({"--layers",      "1",     "--heads",    "3",
                                   "--width",       "30",    "--sequence", "77",
                                   "--micro-batch", "11",    "--steps",    "3",
                                   "--ranks",       "3",     "--stage",    "3",
                                   "--threads",     threads, "--data",     golden("text.txt")});
    ASSERT_EQ(run.code, 0) << run.err;
    hash = hash.empty() ? run.last_line().at("state_hash").get<std::string>() : hash;
    EXPECT_EQ(run.last_line().at("state_hash"), hash) << threads;
  }
}

TEST(GptRun, TrainsOnTheBibleUnlessToldOtherwise) {
  const Ended run = run_program(
      {"--layers", "1", "--heads", "1", "--width", "16", "--sequence", "32", "--steps", "1"});
  if (std::system("command -v bible >/dev/null") == 0) {  // NOLINT(concurrency-mt-unsafe)
    EXPECT_EQ(run.code, 0) << run.err;
  } else {
    EXPECT_EQ(run.code, 2);
    EXPECT_THAT(run.err, HasSubstr("bible-kjv"));
  }
}

TEST(GptRun, PrintsItsOptions) {
  const Ended run = run_program({"--help"});
  EXPECT_EQ(run.code, 0);
  for (const char* option :
       {"layers",       "heads",         "width",   "sequence",  "micro-batch", "micro-batches",
        "steps",        "stage",         "ranks",   "precision", "lr",          "warmup",
        "min-lr-ratio", "weight-decay",  "beta1",   "beta2",     "eps",         "clip",
        "seed",         "device-memory", "threads", "recompute", "data",        "init",
        "save",         "log",           "sample",  "numerics"}) {
    EXPECT_THAT(run.out, HasSubstr("--" + std::string(option) + " "));
  }
}

}  // namespace
}  // namespace gpt::testing
