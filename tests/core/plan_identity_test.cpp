// When two plans are the same, in one process and between ranks.
#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "zero/plan.h"

namespace zero {
namespace {

// All that a plan is made of; every case below changes one thing.
struct Parts {
  std::string group_name = "decay", unit_name = "h.0", parameter_name = "w";
  GroupOptions group{.hyper = {.lr = 0.1, .user = {1, 2, 3, 4}}, .precision = kBf16WithMaster};
  GradientLife life = GradientLife::kBucket;
  std::vector<std::size_t> shape{4, 6};
  std::uint32_t parameter_unit = 0, parameter_group = 0;
  CountInNorm norm = CountInNorm::kYes;
  std::uint64_t user_bytes = 100;
  int extra_groups = 1, extra_units = 1, extra_parameters = 1;
  Options options{.clip_norm = 1.0};
  World world{.shard_ranks = 2};

  [[nodiscard]] Plan plan() const {
    ModelSpec model;
    model.add_group(group_name, group);
    for (int i = 0; i < extra_groups; ++i) {
      model.add_group("group" + std::to_string(i), group);
    }
    model.add_unit(unit_name, life);
    for (int i = 0; i < extra_units; ++i) {
      model.add_unit("unit" + std::to_string(i));
    }
    model.add(UnitId{parameter_unit}, parameter_name, shape, GroupId{parameter_group}, norm);
    for (int i = 0; i < extra_parameters; ++i) {
      model.add(UnitId{1}, "parameter" + std::to_string(i), {3}, GroupId{0});
    }
    model.add_user_bytes("activations", user_bytes);
    return make_plan(model, options, world);
  }
};

struct Change {
  std::string what;
  std::function<void(Parts&)> apply;
};

std::vector<Change> model_changes() {
  return {
      {"group name", [](Parts& p) { p.group_name = "other"; }},
      {"unit name", [](Parts& p) { p.unit_name = "other"; }},
      {"parameter name", [](Parts& p) { p.parameter_name = "other"; }},
      {"shape, same count",
       [](Parts& p) {
         p.shape = {6, 4};
       }},
      {"shape, one more dimension",
       [](Parts& p) {
         p.shape = {4, 6, 1};
       }},
      {"unit of a parameter", [](Parts& p) { p.parameter_unit = 1; }},
      {"group of a parameter", [](Parts& p) { p.parameter_group = 1; }},
      {"norm", [](Parts& p) { p.norm = CountInNorm::kNo; }},
      {"life", [](Parts& p) { p.life = GradientLife::kUntilReady; }},
      {"one more group", [](Parts& p) { ++p.extra_groups; }},
      {"one more unit", [](Parts& p) { ++p.extra_units; }},
      {"one more parameter", [](Parts& p) { ++p.extra_parameters; }},
      {"train", [](Parts& p) { p.group.train = Train::kFrozen; }},
      {"precision", [](Parts& p) { p.group.precision = kFloat32Only; }},
      {"gradient dtype", [](Parts& p) { p.group.precision.gradient = DType::kFloat32; }},
      {"rule name", [](Parts& p) { p.group.rule.name = "other"; }},
      {"state name", [](Parts& p) { p.group.rule.states[0].name = "other"; }},
      {"one more state", [](Parts& p) { p.group.rule.states.push_back({"third"}); }},
      {"lr", [](Parts& p) { p.group.hyper.lr = 0.2; }},
      {"weight decay", [](Parts& p) { p.group.hyper.weight_decay = 0.2; }},
      {"beta1", [](Parts& p) { p.group.hyper.beta1 = 0.2; }},
      {"beta2", [](Parts& p) { p.group.hyper.beta2 = 0.2; }},
      {"eps", [](Parts& p) { p.group.hyper.eps = 0.2; }},
      {"momentum", [](Parts& p) { p.group.hyper.momentum = 0.2; }},
      {"user's first", [](Parts& p) { p.group.hyper.user[0] = 9; }},
      {"user's last", [](Parts& p) { p.group.hyper.user[3] = 9; }},
  };
}

std::vector<Change> option_changes() {
  return {
      {"stage", [](Parts& p) { p.options.stage = Stage::kGradients; }},
      {"numerics", [](Parts& p) { p.options.numerics = Numerics::kStageInvariant; }},
      {"clip", [](Parts& p) { p.options.clip_norm = 2.0; }},
      {"no clip", [](Parts& p) { p.options.clip_norm.reset(); }},
      {"open micro-batches", [](Parts& p) { p.options.max_open_micro_batches = 2; }},
      {"micro-batches", [](Parts& p) { p.options.max_micro_batches = 2; }},
      {"deadline", [](Parts& p) { p.options.deadline = std::chrono::milliseconds(5); }},
      {"live units", [](Parts& p) { p.options.live_units = 3; }},
      {"buckets", [](Parts& p) { p.options.buckets = 3; }},
      {"bucket bytes", [](Parts& p) { p.options.bucket_bytes = 3; }},
      {"ranks", [](Parts& p) { p.world.shard_ranks = 3; }},
      {"transport", [](Parts& p) { p.world.transport = Transport::kNccl; }},
  };
}

TEST(PlanIdentity, PlansOfTheSamePartsAreEqualAndHaveOneDigest) {
  EXPECT_EQ(Parts{}.plan(), Parts{}.plan());
  EXPECT_EQ(Parts{}.plan().digest(), Parts{}.plan().digest());
  const Plan original = Parts{}.plan();
  const Plan copy = original;
  EXPECT_EQ(copy, original);
  EXPECT_EQ(copy.digest(), original.digest());
}

TEST(PlanIdentity, EveryPartCountsInEqualityAndInTheDigest) {
  const Plan base = Parts{}.plan();
  std::set<std::uint64_t> digests{base.digest()};
  std::size_t changes = 0;
  for (const auto& list : {model_changes(), option_changes()}) {
    for (const Change& change : list) {
      Parts parts;
      change.apply(parts);
      const Plan changed = parts.plan();
      EXPECT_FALSE(changed == base) << change.what;
      EXPECT_TRUE(digests.insert(changed.digest()).second) << change.what;
      ++changes;
    }
  }
  EXPECT_EQ(changes, 38U);
}

// Ranks may have activations of different sizes and run together all the same.
TEST(PlanIdentity, UserBytesCountInEqualityOnly) {
  Parts parts;
  parts.user_bytes = 101;
  EXPECT_FALSE(parts.plan() == Parts{}.plan());
  EXPECT_EQ(parts.plan().digest(), Parts{}.plan().digest());
}

// Without lengths in the hash, names that run together would be one.
TEST(PlanIdentity, NamesThatRunTogetherHaveDifferentDigests) {
  Parts a, b;
  a.group_name = "ab";
  a.unit_name = "c";
  b.group_name = "a";
  b.unit_name = "bc";
  EXPECT_NE(a.plan().digest(), b.plan().digest());
}

// Function pointers differ between processes; the digest must not.
TEST(PlanIdentity, TheRulesFunctionsDoNotCount) {
  Parts parts;
  parts.group.rule.cpu = [](const UpdateArguments&, std::size_t, std::size_t) {};
  EXPECT_EQ(parts.plan(), Parts{}.plan());
  EXPECT_EQ(parts.plan().digest(), Parts{}.plan().digest());
}

}  // namespace
}  // namespace zero
