// Misuse of calls that are local to a rank: a typed error that changes nothing and poisons nobody;
// and calls before initialize().
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/support/ranks.h"

namespace zero::testing {
namespace {

enum : std::size_t { kA, kB };
enum : std::size_t { kAWeight, kABase, kALow, kBWeight };

ModelSpec pair_of_units() {
  ModelSpec model;
  const GroupId all = model.add_group("all");
  const GroupId low = model.add_group("low", {.precision = kBf16WithMaster});
  const GroupId frozen = model.add_group("frozen", {.train = Train::kFrozen});
  const UnitId a = model.add_unit("a");
  model.add(a, "a.w", {7}, all);
  model.add(a, "a.base", {3}, frozen);
  model.add(a, "a.low", {300}, low);
  model.add(model.add_unit("b"), "b.w", {300}, all);
  return model;
}

float one(ParameterId, std::size_t) {
  return 1.0F;
}

// Returns: the message of the UsageError that `call` must throw
std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const UsageError& e) {
    return e.what();
  } catch (const std::exception& e) {
    return std::string("not a UsageError: ") + e.what();
  }
  return "nothing was thrown";
}

void expect_says(const std::string& found, std::initializer_list<std::string> parts) {
  for (const std::string& part : parts) {
    EXPECT_NE(found.find(part), std::string::npos) << "expected: " << part << "\nfound: " << found;
  }
}

class MisuseOfLocalCalls : public StagesAndWorlds {
 protected:
  // On every rank alike or on the last alone: then all ranks train on, to the same bits.
  static void expect_harmless(const std::function<void(Rank&)>& misuse) {
    std::vector<std::uint64_t> hashes(2);
    for (const std::size_t with : {0U, 1U}) {
      run_each(world(), pair_of_units(), options(), [&](Rank& rank) {
        if (with == 1 && rank.rank() == rank.world() - 1) {
          misuse(rank);
        }
        EXPECT_TRUE(train_step(rank.optimizer, one).applied);
        const std::uint64_t hash = rank.optimizer.state_hash();
        if (rank.rank() == 0) {
          hashes[with] = hash;
        }
      });
    }
    EXPECT_EQ(hashes[0], hashes[1]);
  }
};
INSTANTIATE_TEST_SUITE_P(All, MisuseOfLocalCalls, every_case(), case_name);

TEST_P(MisuseOfLocalCalls, OfSettersNamesTheGroupAndChangesNothing) {
  expect_harmless([](Rank& rank) {
    Optimizer& o = rank.optimizer;
    const std::string who = "rank " + std::to_string(rank.rank()) + ": ";
    expect_says(refusal([&] { (void)o.hyper(GroupId{9}); }), {who, "hyper() of a group"});
    expect_says(refusal([&] { o.set(GroupId{9}, {}); }), {who, "set() of a group"});
    const double nan = std::nan(""), infinity = std::numeric_limits<double>::infinity();
    for (const Hyper& bad :
         {Hyper{.lr = nan}, Hyper{.lr = infinity}, Hyper{.weight_decay = nan}, Hyper{.beta1 = 1},
          Hyper{.beta1 = -0.1}, Hyper{.beta1 = nan}, Hyper{.beta2 = 1.5}, Hyper{.beta2 = nan},
          Hyper{.eps = -1e-8}, Hyper{.eps = nan}, Hyper{.momentum = infinity}}) {
      expect_says(refusal([&] { o.set(GroupId{1}, bad); }), {who, "group 'low'"});
    }
    EXPECT_EQ(o.hyper(GroupId{1}), Hyper{});
  });
}

TEST_P(MisuseOfLocalCalls, OfVisitsSaysWhatThereIsNot) {
  expect_harmless([](Rank& rank) {
    Optimizer& o = rank.optimizer;
    const Visit nothing = [](ParameterId, std::uint64_t, std::span<const float>) {};
    expect_says(refusal([&] { o.visit_own_state("momentum", nothing); }), {"state 'momentum'"});
    expect_says(refusal([&] { o.visit_own(Values::kGradients, nothing); }),
                {"visit of gradients outside of step()"});
    expect_says(refusal([&] { (void)o.step_count(parameter(99)); }), {"step_count()"});
  });
}

TEST_P(MisuseOfLocalCalls, OfAParameterLeaseNamesTheParameterAndItsUnit) {
  run_each(world(), pair_of_units(), options(), [](Rank& rank) {
    {
      const ParameterLease lease = rank.optimizer.parameters(unit(kA), kHost);
      const std::string who = "rank " + std::to_string(rank.rank()) + ": ";
      expect_says(refusal([&] { (void)lease.data<bf16>(parameter(kAWeight)); }),
                  {who, "parameter 'a.w' is fp32, but was asked for as bf16"});
      expect_says(refusal([&] { (void)lease.data<float>(parameter(kALow)); }),
                  {who, "parameter 'a.low' is bf16, but was asked for as fp32"});
      expect_says(refusal([&] { (void)lease.data<float>(parameter(kBWeight)); }),
                  {who, "'b.w' belongs to unit 'b', but the lease is of unit 'a'"});
      expect_says(refusal([&] { (void)lease.data<float>(parameter(99)); }),
                  {who, "not in the model"});
      EXPECT_NE(lease.data<float>(parameter(kABase)), nullptr);
    }
    EXPECT_TRUE(train_step(rank.optimizer, one).applied);
  });
}

TEST_P(MisuseOfLocalCalls, OfAGradientLeaseNamesTheParameterAndItsUnit) {
  run_each(world(), pair_of_units(), options(), [](Rank& rank) {
    MicroBatch micro = rank.optimizer.begin_micro_batch({.last = Last::kYes});
    {
      GradientLease lease = micro.gradients(unit(kA), kHost);
      const std::string who = "rank " + std::to_string(rank.rank()) + ": ";
      expect_says(refusal([&] { (void)lease.data<bf16>(parameter(kAWeight)); }),
                  {who, "the gradient of parameter 'a.w' is fp32, but was asked for as bf16"});
      expect_says(refusal([&] { (void)lease.data<float>(parameter(kALow)); }),
                  {who, "the gradient of parameter 'a.low' is bf16, but was asked for as fp32"});
      expect_says(refusal([&] { (void)lease.data<float>(parameter(kBWeight)); }),
                  {who, "'b.w' belongs to unit 'b', but the gradient lease is of unit 'a'"});
      expect_says(refusal([&] { (void)lease.data<float>(parameter(kABase)); }),
                  {who, "'a.base' is frozen (group 'frozen')"});
      expect_says(refusal([&] { (void)lease.data<float>(parameter(99)); }),
                  {who, "not in the model"});
    }
    run_backward(rank.optimizer, micro, one);
    EXPECT_TRUE(rank.optimizer.step().get().applied);
    EXPECT_EQ(whole(rank, Values::kGradients)[kAWeight], std::vector<float>(7, 1.0F));
  });
}

TEST_P(MisuseOfLocalCalls, OfAnUnusedParametersGradientSaysThatItWasMarked) {
  run_each(world(), pair_of_units(), options(), [](Rank& rank) {
    MicroBatch micro = rank.optimizer.begin_micro_batch({.last = Last::kYes});
    micro.mark_unused(parameter(kBWeight));
    {
      GradientLease lease = micro.gradients(unit(kB), kHost);
      expect_says(refusal([&] { (void)lease.data<float>(parameter(kBWeight)); }),
                  {"'b.w' of unit 'b' after mark_unused()"});
    }
    micro.ready(unit(kB), kHost);
    for (const std::size_t p : {kAWeight, kALow}) {
      write(rank.optimizer, micro, parameter(p), one);
    }
    micro.ready(unit(kA), kHost);
    EXPECT_TRUE(rank.optimizer.step().get().applied);
    EXPECT_EQ(rank.optimizer.step_count(parameter(kBWeight)), 0);
  });
}

class MisuseBeforeInitialize : public StagesAndWorlds {};
INSTANTIATE_TEST_SUITE_P(All, MisuseBeforeInitialize, every_case(), case_name);

TEST_P(MisuseBeforeInitialize, NamesTheCall) {
  const Visit nothing = [](ParameterId, std::uint64_t, std::span<const float>) {};
  struct Call {
    const char* name;
    std::function<void(Optimizer&)> make;
  };
  const std::vector<Call> calls{
      {"parameters()", [](Optimizer& o) { (void)o.parameters(unit(kA), kHost); }},
      {"begin_micro_batch()", [](Optimizer& o) { (void)o.begin_micro_batch(); }},
      {"step()", [](Optimizer& o) { o.step(); }},
      {"overwrite_own()", [](Optimizer& o) { o.overwrite_own(initial_values); }},
      {"visit_own()", [&](Optimizer& o) { o.visit_own(Values::kMaster, nothing); }},
      {"visit_own_state()", [&](Optimizer& o) { o.visit_own_state("exp_avg", nothing); }},
      {"visit_all()", [&](Optimizer& o) { o.visit_all(Values::kMaster, nothing); }},
      {"state_hash()", [](Optimizer& o) { (void)o.state_hash(); }}};
  for (const Call& call : calls) {
    const std::vector<Ending> found = endings(world(), [&](Communicator& communicator) {
      const auto device = make_cpu_backend();
      Optimizer optimizer(
          make_plan(pair_of_units(), options(), {.shard_ranks = communicator.world()}), *device,
          {communicator});
      call.make(optimizer);
    });
    for (const Ending& end : found) {
      EXPECT_TRUE(end.kind == "UsageError" || end.kind == "CommError") << call.name << end.what;
      expect_says(end.what, {std::string(call.name) + " before initialize()"});
    }
  }
}

}  // namespace
}  // namespace zero::testing
