// Every reason for which gpt_train does not start: exit code 2, one line, nothing written.
#include <gmock/gmock.h>
#include <sys/stat.h>

#include "tests/examples/gpt_program.h"
#include "tests/support/time_scale.h"

namespace gpt::testing {
namespace {

// What each case may use: a folder with a text, a log and a save path, and files that are wrong.
struct Place {
  Folder folder;
  std::string text = folder.make_file("text.txt", std::string(2000, 'a'));
  std::string empty = folder.make_file("empty.txt", "");
  std::string short_text = folder.make_file("short.txt", std::string(65, 'a'));
  std::string broken = folder.make_file("broken.safetensors", "this is no safetensors file");
  std::string log = folder / "run.jsonl", save = folder / "last.safetensors";
};

// A run that would start, with `change` in place of the option of the same name.
Arguments changed(const Place& place, const Arguments& change) {
  std::map<std::string, Arguments> options{
      {"--layers", {"2"}},      {"--heads", {"2"}},       {"--width", {"64"}},
      {"--sequence", {"64"}},   {"--micro-batch", {"2"}}, {"--steps", {"2"}},
      {"--data", {place.text}}, {"--log", {place.log}},   {"--save", {place.save}}};
  Arguments out;
  if (!change.empty()) {
    options.erase(change.front());
  }
  for (const auto& [name, values] : options) {
    out = out + Arguments{name} + values;
  }
  return out + change;
}

void expect_refused(const Place& place, const Arguments& arguments, const std::string& reason) {
  const auto before = place.folder.contents();
  const Ended run = run_program(arguments);
  const std::string what = ::testing::PrintToString(arguments);
  EXPECT_EQ(run.code, 2) << what << run.err;
  EXPECT_EQ(lines_of(run.err).size(), 1U) << what << run.err;
  EXPECT_THAT(run.err, ::testing::HasSubstr(reason)) << what;
  EXPECT_EQ(place.folder.contents(), before) << what;
  EXPECT_LT(run.time, zero::testing::scaled(std::chrono::seconds(5))) << what;
}

TEST(GptRefusal, StartsTheRunThatTheOthersAreChangesOf) {
  const Place place;
  const Ended run = run_program(changed(place, {}));
  EXPECT_EQ(run.code, 0) << run.err;
  EXPECT_EQ(run.err, "");
  EXPECT_EQ(read_log(place.log).size(), 2U);
}

TEST(GptRefusal, NamesFlagsThatAreUnknownRepeatedOrWithoutValue) {
  const Place place;
  const Arguments good = changed(place, {});
  expect_refused(place, good + Arguments{"--layer", "2"}, "--layer");
  expect_refused(place, good + Arguments{"--colour", "red"}, "--colour");
  expect_refused(place, good + Arguments{"word"}, "word");
  expect_refused(place, good + Arguments{"-s"}, "-s");
  expect_refused(place, good + Arguments{"--layers", "2"}, "--layers");
  expect_refused(place, good + Arguments{"--data", place.text}, "--data");
  expect_refused(place, good + Arguments{"--recompute", "--recompute"}, "--recompute");
  expect_refused(place, good + Arguments{"--seed"}, "--seed");
  expect_refused(place, {"--data"}, "--data");
}

TEST(GptRefusal, NamesSizesThatAreNone) {
  const Place place;
  int tried = 0;
  for (const char* option : {"--layers", "--heads", "--width", "--sequence", "--micro-batch",
                             "--micro-batches", "--ranks", "--threads"}) {
    for (const char* value : {"0", "-1", "1.5", "two", "", "99999999999999999999"}) {
      expect_refused(place, changed(place, {option, value}), option);
      ++tried;
    }
  }
  EXPECT_EQ(tried, 48);
}

TEST(GptRefusal, NamesChoicesThatThereAreNot) {
  const Place place;
  for (const Arguments& change : std::vector<Arguments>{{"--steps", "-1"},
                                                        {"--warmup", "-1"},
                                                        {"--sample", "-1"},
                                                        {"--stage", "4"},
                                                        {"--stage", "-1"},
                                                        {"--precision", "fp16"},
                                                        {"--numerics", "exact"},
                                                        {"--heads", "3"},
                                                        {"--seed", "-x"},
                                                        {"--device-memory", "0"},
                                                        {"--device-memory", "256MB"},
                                                        {"--device-memory", "lots"},
                                                        {"--device-memory", "-5MiB"},
                                                        {"--device-memory", "99999999999GiB"}}) {
    expect_refused(place, changed(place, change), change.front());
  }
}

TEST(GptRefusal, NamesNumbersOutOfRange) {
  const Place place;
  int tried = 0;
  for (const char* option :
       {"--lr", "--eps", "--weight-decay", "--clip", "--beta1", "--beta2", "--min-lr-ratio"}) {
    for (const char* value : {"-0.1", "nan", "inf", "-inf", "1e999", "some"}) {
      expect_refused(place, changed(place, {option, value}), option);
      ++tried;
    }
  }
  EXPECT_EQ(tried, 42);
  expect_refused(place, changed(place, {"--beta1", "1"}), "--beta1");
  expect_refused(place, changed(place, {"--beta2", "1"}), "--beta2");
  expect_refused(place, changed(place, {"--min-lr-ratio", "1.01"}), "--min-lr-ratio");
}

TEST(GptRefusal, NamesDataThatCannotBeTrainedOn) {
  const Place place;
  const std::string nowhere = place.folder / "nowhere.txt", folder = place.folder / ".";
  expect_refused(place, changed(place, {"--data", nowhere}), nowhere);
  expect_refused(place, changed(place, {"--data", place.empty}), "empty");
  expect_refused(place, changed(place, {"--data", folder}), "a directory");
  expect_refused(place, changed(place, {"--data", "/dev/zero"}), "regular file");
  expect_refused(place, changed(place, {"--data", place.short_text}), "65");
  expect_refused(place, changed(place, {"--data", place.text, nowhere}), nowhere);
  const std::string enough = place.folder.make_file("enough.txt", std::string(66, 'a'));
  EXPECT_EQ(run_program(changed(place, {"--data", enough})).code, 0);
}

TEST(GptRefusal, NamesWeightsThatAreNotTheModels) {
  const Place place;
  const auto tensors = [&](const std::string& name, std::size_t width) {
    const std::string path = place.folder / name;
    zero::SafetensorsWriter writer(path, {{"wte.weight", {256, width}}});
    writer.write("wte.weight", 0, std::vector<float>(256 * width));
    writer.finish();
    return path;
  };
  expect_refused(place, changed(place, {"--init", place.folder / "nowhere"}), "nowhere");
  expect_refused(place, changed(place, {"--init", place.broken}), "broken.safetensors");
  expect_refused(place, changed(place, {"--init", place.folder / "."}), "--init");
  expect_refused(place, changed(place, {"--init", tensors("few", 64)}), "wpe.weight");
  expect_refused(place, changed(place, {"--init", tensors("narrow", 32)}), "wte.weight");
  expect_refused(
      place, changed(place, {"--init", golden("init.safetensors")}) + Arguments{"--warmup", "-1"},
      "--warmup");
  Arguments deeper = changed(place, {"--layers", "3"}),
            shallower = changed(place, {"--layers", "1"});
  expect_refused(place, deeper + Arguments{"--init", golden("init.safetensors")}, "h.2");
  expect_refused(place, shallower + Arguments{"--init", golden("init.safetensors")}, "--layers");
}

TEST(GptRefusal, NamesPathsThatCannotBeWritten) {
  const Place place;
  const std::string inside = place.folder / "no/such/folder/file", folder = place.folder / ".";
  expect_refused(place, changed(place, {"--log", inside}), "--log");
  expect_refused(place, changed(place, {"--save", inside}), "--save");
  expect_refused(place, changed(place, {"--log", folder}), "--log");
  expect_refused(place, changed(place, {"--save", folder}), "--save");
  expect_refused(place, changed(place, {"--log", ""}), "--log");
  expect_refused(place, changed(place, {"--save", ""}), "--save");
  expect_refused(place, changed(place, {"--log", place.text}), "--log");
  expect_refused(place, changed(place, {"--save", place.text}), "--save");
  expect_refused(place, changed(place, {"--log", place.save}), "--log");
  const std::string other_name = place.folder / "hard";
  std::filesystem::create_hard_link(place.text, other_name);
  expect_refused(place, changed(place, {"--log", other_name}), "--log");
  const Folder pipes;
  const std::string pipe = pipes / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  expect_refused(place, changed(place, {"--log", pipe}), "--log");
}

TEST(GptRefusal, ShowsTheTableAndWhatWouldFitWhenTheBudgetIsTooSmall) {
  const Place place;
  const Arguments model{"--width", "256",      "--layers",        "4",
                        "--heads", "4",        "--sequence",      "128",
                        "--data",  place.text, "--log",           place.log,
                        "--save",  place.save, "--device-memory", "56MiB"};
  for (const Arguments& world :
       {Arguments{"--ranks", "1", "--stage", "0"}, Arguments{"--ranks", "4", "--stage", "0"}}) {
    const Ended run = run_program(model + world);
    EXPECT_THAT(run.out, ::testing::HasSubstr("exp_avg_sq"));
    EXPECT_THAT(run.out, ::testing::HasSubstr("activations"));
    expect_refused(place, model + world, "stage 3 on 4 ranks");
  }
  expect_refused(place, model + Arguments{"--width", "60000"}, "--width");
  expect_refused(place, changed(place, {"--device-memory", "1"}), "does not fit");
}

TEST(GptRefusal, ComesBeforeAModelThatNoMachineHolds) {
  const Place place;
  const Arguments giant = changed(place, {"--width", "65536"}) + Arguments{"--stage", "3"};
  expect_refused(place, giant, "does not fit");
  expect_refused(place, giant + Arguments{"--device-memory", "1GiB"}, "does not fit");
  expect_refused(place, changed(place, {"--layers", "4096"}) + Arguments{"--device-memory", "1MiB"},
                 "does not fit");
}

}  // namespace
}  // namespace gpt::testing
