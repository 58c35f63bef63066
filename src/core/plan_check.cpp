#include "core/plan_check.h"

#include <algorithm>
#include <cmath>
#include <sstream>

#include "zero/error.h"
#include "zero/update_arguments.h"

namespace zero {
namespace {

template <class T>
void expect(bool holds, std::string_view name, std::string_view expected, const T& found,
            std::string_view advice) {
  if (!holds) {
    std::ostringstream message;
    message << name << ": expected " << expected << ", found " << found << "; " << advice;
    throw UsageError(message.str());
  }
}

void expect_positive(std::string_view name, int found, std::string_view advice) {
  expect(found >= 1, name, "at least 1", found, advice);
}

bool is_fused(const UpdateRule& rule) {
  return rule.between == Between::kNothing;
}

void check_rule(const std::string& group, const UpdateRule& rule) {
  const std::string name = "group \"" + group + "\", rule \"" + rule.name + "\"";
  expect(rule.cpu != nullptr || rule.cuda != nullptr, name, "a function for the CPU or CUDA",
         "none", "take a rule of update_rule.h or set UpdateRule::cpu");
  expect(is_fused(rule), name, "Between::kNothing", "a rule that needs more than one pass",
         "this build carries fused rules only");
  expect(rule.states.size() <= UpdateArguments{}.states.size(), name, "at most 4 states",
         rule.states.size(), "merge some");
  for (const StateSpec& state : rule.states) {
    const std::string where = name + ", state \"" + state.name + "\"";
    expect(state.dtype == DType::kFloat32, where, "fp32", name_of(state.dtype),
           "this build carries fp32 states only");
    expect(state.elements_per_value == 1, where, "one element per value", state.elements_per_value,
           "this build carries one value an element only");
  }
  for (auto state = rule.states.begin(); state != rule.states.end(); ++state) {
    const bool taken = std::any_of(rule.states.begin(), state, [&](const StateSpec& earlier) {
      return earlier.name == state->name;
    });
    expect(!taken, name, "a name of its own for each state", "two called \"" + state->name + "\"",
           "rename one");
  }
}

}  // namespace

void check_world(const World& world) {
  expect_positive("World::shard_ranks", world.shard_ranks,
                  "give the number of ranks, communicator.world()");
  constexpr int kLimit = 1 << ControlLayout::kLaneBits;
  expect(world.shard_ranks < kLimit, "World::shard_ranks", "fewer than 2^21", world.shard_ranks,
         "the step's control message counts ranks in 21 bits");
  expect(world.replicate_ranks == 1, "World::replicate_ranks", "1", world.replicate_ranks,
         "replicas of shards are not supported yet: put all ranks into shard_ranks");
  expect(world.transport <= Transport::kNccl, "World::transport", "0 to 2",
         static_cast<int>(world.transport), "use an enumerator of Transport");
}

void check_hyper(const std::string& what, const Hyper& hyper) {
  const auto check = [&](const char* name, double value, bool legal, const char* range) {
    expect(std::isfinite(value) && legal, what + ": Hyper::" + name, range, value,
           "no bit of the model was changed");
  };
  check("lr", hyper.lr, hyper.lr >= 0, "a finite number >= 0");
  check("weight_decay", hyper.weight_decay, hyper.weight_decay >= 0, "a finite number >= 0");
  check("beta1", hyper.beta1, hyper.beta1 >= 0 && hyper.beta1 < 1, "a number in [0, 1)");
  check("beta2", hyper.beta2, hyper.beta2 >= 0 && hyper.beta2 < 1, "a number in [0, 1)");
  check("eps", hyper.eps, hyper.eps >= 0, "a finite number >= 0");
  check("momentum", hyper.momentum, true, "a finite number");
}

void check_options(const Options& options) {
  expect(options.stage <= Stage::kParameters, "Options::stage", "0 to 3",
         static_cast<int>(options.stage), "use an enumerator of Stage");
  expect(options.numerics <= Numerics::kWorldInvariant, "Options::numerics", "0 to 2",
         static_cast<int>(options.numerics), "use an enumerator of Numerics");
  expect_positive("Options::live_units", options.live_units, "2 lets gathers overlap");
  expect_positive("Options::buckets", options.buckets, "2 lets reductions overlap");
  expect(options.bucket_bytes > 0, "Options::bucket_bytes", "at least 1", options.bucket_bytes,
         "use the default of 25 MiB; 1 makes a bucket of each unit");
  expect_positive("Options::max_open_micro_batches", options.max_open_micro_batches,
                  "use 1 unless micro-batches overlap");
  constexpr int kMostOpen = 4096;  // each costs host memory for every unit and parameter
  expect(options.max_open_micro_batches <= kMostOpen, "Options::max_open_micro_batches",
         "at most 4096", options.max_open_micro_batches, "use 1 unless micro-batches overlap");
  expect_positive("Options::max_micro_batches", options.max_micro_batches,
                  "give the most micro-batches of one step");
  if (options.clip_norm.has_value()) {
    const double clip = *options.clip_norm;
    expect(std::isfinite(clip) && clip > 0, "Options::clip_norm", "a finite number above 0", clip,
           "leave it empty for no clipping");
  }
  expect(options.deadline.count() > 0, "Options::deadline", "more than 0 ms",
         options.deadline.count(), "use the default of 10 minutes");
}

void check_model(const ModelSpec& model) {
  expect(!model.units().empty(), "model", "at least one unit", "none",
         "call ModelSpec::add_unit before make_plan");
  expect(!model.parameters().empty(), "model", "at least one parameter", "none",
         "call ModelSpec::add before make_plan");
  for (const ModelSpec::Group& group : model.groups()) {
    if (group.options.train == Train::kYes) {
      check_rule(group.name, group.options.rule);
    }
  }
}

void check_id(std::size_t found, std::size_t end, std::string_view what) {
  if (found >= end) {  // first, since messages are dear and this is called often
    expect(false, what, "one of the plan's " + std::to_string(end), found,
           "ids count from 0 and belong to one model");
  }
}

void check_rank(const Plan& plan, int rank) {
  expect(rank >= 0 && rank < plan.world().shard_ranks, "rank",
         "0 to " + std::to_string(plan.world().shard_ranks - 1), rank,
         "give a rank of the plan's world");
}

}  // namespace zero
