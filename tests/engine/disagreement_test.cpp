// Ranks that call the same verbs with different choices: an error on all ranks, with both sides.
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "tests/support/ranks.h"

namespace zero::testing {
namespace {

float one(ParameterId, std::size_t) {
  return 1.0F;
}

// Three ranks, of which the last does something else.
class Disagreement : public ::testing::TestWithParam<Stage> {
 protected:
  static constexpr int kWorld = 3;
  static Options options() {
    return {.stage = GetParam(), .deadline = scaled(std::chrono::seconds(2)), .bucket_bytes = 1};
  }
  static std::vector<Ending> run_odd_one_out(const std::function<void(Rank&, bool odd)>& body,
                                             const Options& choice = options()) {
    return endings(kWorld, [&](Communicator& communicator) {
      Rank rank(plain_model({7, 300, 5}), choice, communicator);
      try {
        body(rank, rank.rank() == kWorld - 1);
        // Whoever got this far learns of it from the next collective at the latest.
        train_step(rank.optimizer, one);
        train_step(rank.optimizer, one);
      } catch (const Error& first) {
        EXPECT_THROW((void)rank.optimizer.begin_micro_batch(), Error) << first.what();
        throw;
      }
    });
  }
  static void expect_all(const std::vector<Ending>& found,
                         std::initializer_list<std::string> says) {
    for (const Ending& end : found) {
      EXPECT_TRUE(end.kind == "CommError" || end.kind == "UsageError") << end.kind << end.what;
      EXPECT_NE(end.what.find("rank 2"), std::string::npos) << end.what;
      for (const std::string& part : says) {
        EXPECT_NE(end.what.find(part), std::string::npos)
            << "expected: " << part << "\nfound: " << end.what;
      }
    }
  }
  static void step_with(Rank& rank, const StepOptions& choice) {
    run_micro_batch(rank.optimizer, one);
    (void)rank.optimizer.step(choice).get();
  }

 private:
  Watchdog watchdog_{std::chrono::seconds(30)};
};
INSTANTIATE_TEST_SUITE_P(All, Disagreement, every_stage());

TEST_P(Disagreement, OnHyperParametersIsSeenAtTheStep) {
  const std::vector<std::function<void(Hyper&)>> changes{
      [](Hyper& h) { h.lr = 2e-3; },    [](Hyper& h) { h.weight_decay = 0.1; },
      [](Hyper& h) { h.beta1 = 0.8; },  [](Hyper& h) { h.beta2 = 0.9; },
      [](Hyper& h) { h.eps = 1e-6; },   [](Hyper& h) { h.momentum = 0.9; },
      [](Hyper& h) { h.user[3] = 1.0; }};
  for (const auto& change : changes) {
    expect_all(run_odd_one_out([&](Rank& rank, bool odd) {
                 Hyper hyper = rank.optimizer.hyper(GroupId{0});
                 if (odd) {
                   change(hyper);
                 }
                 rank.optimizer.set(GroupId{0}, hyper);
                 step_with(rank, {});
               }),
               {"step 0", "hyper-parameters"});
  }
}

TEST_P(Disagreement, OnTokensGivenIsSeenAtTheStep) {
  expect_all(run_odd_one_out([](Rank& rank, bool odd) {
               StepOptions choice;
               if (!odd) {
                 choice.local_tokens = 5;
               }
               step_with(rank, choice);
             }),
             {"tokens given", "tokens not given"});
}

TEST_P(Disagreement, OnClippingIsSeenAtTheStep) {
  expect_all(run_odd_one_out(
                 [](Rank& rank, bool odd) { step_with(rank, {.clip_norm = odd ? 1.0 : 2.0}); }),
             {"clip_norm 1", "clip_norm 2"});
}

// Closer than six digits after the point show.
TEST_P(Disagreement, OnTheRatesScaleIsSeenAtTheStep) {
  expect_all(run_odd_one_out([](Rank& rank, bool odd) {
               step_with(rank, {.lr_scale = odd ? 1.0 : 1.0 + 1e-12});
             }),
             {"lr_scale"});
}

TEST_P(Disagreement, OnTheNumberOfMicroBatchesIsSeenAtTheStep) {
  expect_all(run_odd_one_out([](Rank& rank, bool odd) {
               if (odd) {
                 run_micro_batch(rank.optimizer, one, Last::kNo);
               }
               step_with(rank, {});
             }),
             {});
}

TEST_P(Disagreement, OnLastIsNeverAWrongSum) {
  const std::vector<Ending> found = run_odd_one_out([](Rank& rank, bool odd) {
    run_micro_batch(rank.optimizer, one, odd ? Last::kNo : Last::kYes);
    (void)rank.optimizer.step().get();
    EXPECT_EQ(whole(rank, Values::kGradients)[1], std::vector<float>(300, 1.0F));
  });
  if (GetParam() >= Stage::kGradients) {  // there `last` is not used
    for (const Ending& end : found) {
      EXPECT_EQ(end.what, "");
    }
  } else {
    expect_all(found, {"gradients"});
  }
}

TEST_P(Disagreement, OnTheOrderOfReadyIsSeenWhereRanksMeet) {
  expect_all(run_odd_one_out([](Rank& rank, bool odd) {
               MicroBatch micro = rank.optimizer.begin_micro_batch({.last = Last::kYes});
               const std::vector<std::size_t> order =
                   odd ? std::vector<std::size_t>{0, 1, 2} : std::vector<std::size_t>{2, 1, 0};
               for (const std::size_t u : order) {
                 write(rank.optimizer, micro, parameter(u), one);
                 micro.ready(unit(u), kHost);
               }
               (void)rank.optimizer.step().get();
             }),
             {"'u.0'", "'u.2'"});
}

TEST_P(Disagreement, OnAbandoningIsAnErrorOnAllRanks) {
  expect_all(run_odd_one_out([](Rank& rank, bool odd) {
               if (odd) {
                 run_micro_batch(rank.optimizer, one, Last::kNo);
                 rank.optimizer.abandon_step();
               } else {
                 step_with(rank, {});
               }
             }),
             {});
  expect_all(run_odd_one_out([](Rank& rank, bool odd) {
               if (!odd) {
                 run_micro_batch(rank.optimizer, one, Last::kNo);
                 rank.optimizer.abandon_step();
               } else {
                 step_with(rank, {});
               }
             }),
             {});
}

TEST_P(Disagreement, OnWhenToAbandonIsAnErrorOnAllRanks) {
  expect_all(run_odd_one_out([](Rank& rank, bool odd) {
               if (odd) {
                 step_with(rank, {});
                 rank.optimizer.abandon_step();
               } else {
                 rank.optimizer.abandon_step();
                 step_with(rank, {});
               }
             }),
             {"abandon of step"});
}

TEST_P(Disagreement, OnSettingParametersAnewIsAnErrorOnAllRanks) {
  for (const bool again : {true, false}) {
    expect_all(run_odd_one_out([&](Rank& rank, bool odd) {
                 train_step(rank.optimizer, one);
                 if (odd && again) {
                   rank.optimizer.initialize(initial_values);
                 } else if (odd) {
                   rank.optimizer.overwrite_own(initial_values);
                 }
               }),
               {GetParam() != Stage::kParameters ? ""
                : again                          ? "initialize() of step 1"
                                                 : "overwrite_own() of step 1"});
  }
}

TEST_P(Disagreement, OnWhichOptimizerStepsIsAnErrorOnAllRanks) {
  const std::vector<Ending> found = endings(kWorld, [&](Communicator& communicator) {
    Rank x(plain_model({7, 300, 5}), options(), communicator);
    Rank y(plain_model({7, 300, 5}), options(), communicator);
    const bool odd = communicator.rank() == kWorld - 1;
    train_step(odd ? y.optimizer : x.optimizer, one);
    train_step(odd ? x.optimizer : y.optimizer, one);
  });
  expect_all(found, {"optimizer 2: "});
}

TEST_P(Disagreement, OnVisitsIsAnErrorOnAllRanks) {
  const Visit nothing = [](ParameterId, std::uint64_t, std::span<const float>) {};
  expect_all(run_odd_one_out([&](Rank& rank, bool odd) {
               if (!odd) {
                 (void)rank.optimizer.state_hash();
               } else {
                 step_with(rank, {});
               }
             }),
             {});
  const std::vector<Ending> found = run_odd_one_out([&](Rank& rank, bool odd) {
    if (odd) {
      rank.optimizer.visit_all(Values::kMaster, nothing);
    }
  });
  for (const Ending& end : found) {  // below stage 1 masters are everywhere: nobody must answer
    EXPECT_EQ(end.what.empty(), GetParam() != Stage::kParameters) << end.what;
  }
}

// An exception of the user's own in the middle of backward.
TEST_P(Disagreement, ByAUsersExceptionInBackwardReachesAllRanks) {
  for (const bool deep : {false, true}) {
    const std::vector<Ending> found = run_odd_one_out([&](Rank& rank, bool odd) {
      step_with(rank, {});
      MicroBatch micro = rank.optimizer.begin_micro_batch({.last = Last::kYes});
      for (const std::size_t u : {2U, 1U, 0U}) {
        const ParameterLease weights = rank.optimizer.parameters(unit(u), kHost);
        GradientLease lease = micro.gradients(unit(u), kHost);
        (void)lease.data<float>(parameter(u));
        if (odd && u == (deep ? 0U : 2U)) {
          throw std::runtime_error("out of data");
        }
        { const GradientLease closed = std::move(lease); }
        micro.ready(unit(u), kHost);
      }
      (void)rank.optimizer.step().get();
    });
    EXPECT_EQ(found[2].kind, "std::exception");
    for (const std::size_t r : {0U, 1U}) {
      EXPECT_EQ(found[r].kind, "CommError") << found[r].what;
      EXPECT_NE(found[r].what.find("rank 2"), std::string::npos) << found[r].what;
    }
  }
}

// ---- at construction: before anything is allocated

class DisagreementOnPlans : public Disagreement {
 protected:
  using Change = std::function<void(ModelSpec&, Options&)>;
  static std::vector<Ending> construct(const Change& change, int odd_world = kWorld) {
    return endings(kWorld, [&](Communicator& communicator) {
      const bool odd = communicator.rank() == kWorld - 1;
      ModelSpec model = plain_model({7, 300, 5});
      Options choice = options();
      if (odd) {
        change(model, choice);
      }
      const auto device = make_cpu_backend();
      const Plan plan = make_plan(model, choice, {.shard_ranks = odd ? odd_world : kWorld});
      try {
        const Optimizer optimizer(plan, *device, {communicator});
        ADD_FAILURE() << "constructed";
      } catch (...) {
        EXPECT_EQ(device->usage().current_bytes, 0U);
        throw;
      }
    });
  }
};
INSTANTIATE_TEST_SUITE_P(All, DisagreementOnPlans, every_stage());

TEST_P(DisagreementOnPlans, IsRefusedAtConstruction) {
  const std::vector<Change> changes{
      [](ModelSpec& m, Options&) { m.add(unit(0), "one more", {1}, GroupId{0}); },
      [](ModelSpec& m, Options&) { m.add_unit("one more"); },
      [](ModelSpec& m, Options&) { m.add_group("one more"); },
      [](ModelSpec& m, Options&) {
        m = plain_model({7, 300, 6});
      },
      [](ModelSpec& m, Options&) {
        m = plain_model({300, 7, 5});
      },
      [](ModelSpec& m, Options&) {
        m = plain_model({7, 300, 5}, {}, kBf16WithMaster);
      },
      [](ModelSpec& m, Options&) {
        m = plain_model({7, 300, 5}, {.lr = 1});
      },
      [](ModelSpec&, Options& o) {
        o.stage = o.stage == Stage::kStates ? Stage::kGradients : Stage::kStates;
      },
      [](ModelSpec&, Options& o) { o.numerics = Numerics::kStageInvariant; },
      [](ModelSpec&, Options& o) { o.clip_norm = 1.0; },
      [](ModelSpec&, Options& o) { o.bucket_bytes = 1U << 20U; },
      [](ModelSpec&, Options& o) { o.max_open_micro_batches = 2; },
      [](ModelSpec&, Options& o) { o.live_units = 3; }};
  for (std::size_t i = 0; i < changes.size(); ++i) {
    for (const Ending& end : construct(changes[i])) {
      EXPECT_TRUE(end.kind == "UsageError" || end.kind == "CommError") << i << ": " << end.what;
      EXPECT_NE(end.what.find("the plans of rank 0"), std::string::npos) << i << ": " << end.what;
      EXPECT_NE(end.what.find("rank 2"), std::string::npos) << i << ": " << end.what;
      EXPECT_NE(end.what.find("make the same model, options and world"), std::string::npos);
    }
  }
}

TEST_P(DisagreementOnPlans, ShowsTheFirstLineThatDiffers) {
  const auto expect = [](const Change& change, const std::string& mine, const std::string& others) {
    for (const Ending& end : construct(change)) {
      EXPECT_NE(end.what.find("rank 2 has " + mine), std::string::npos) << end.what;
      EXPECT_NE(end.what.find("rank 0 has " + others), std::string::npos) << end.what;
    }
  };
  const std::string group = "group '" + plain_model({7}).groups()[0].name + "': lr ";
  expect(
      [](ModelSpec& m, Options&) {
        m = plain_model({7, 300, 5}, {.lr = 0.75});
      },
      group + "0.75", group);
  expect([](ModelSpec&, Options& o) { o.live_units = 3; }, "options: ", "options: ");
  expect([](ModelSpec& m, Options&) { m.add_unit("one more"); }, "unit 'one more'", "parameter '");
}

TEST_P(DisagreementOnPlans, OfAnotherWorldThanTheCommunicatorsIsRefused) {
  for (const Ending& end : construct([](ModelSpec&, Options&) {}, 2)) {
    EXPECT_TRUE(end.kind == "UsageError" || end.kind == "CommError") << end.what;
    EXPECT_NE(end.what.find("rank 2: the plan is for 2 ranks, but the communicator has 3"),
              std::string::npos)
        << end.what;
  }
}

TEST_P(DisagreementOnPlans, OfARankWithoutMemoryIsKnownToAll) {
  const std::vector<Ending> found = endings(kWorld, [&](Communicator& communicator) {
    const Plan plan =
        make_plan(plain_model({7, 300, 5}), options(), {.shard_ranks = communicator.world()});
    const auto device =
        make_cpu_backend(communicator.rank() == 2 ? plan.peak_bytes(2) - 1 : kUnlimited);
    const Optimizer optimizer(plan, *device, {communicator});
  });
  EXPECT_EQ(found[2].kind, "OutOfMemory") << found[2].what;
  for (const std::size_t r : {0U, 1U}) {
    EXPECT_EQ(found[r].kind, "CommError") << found[r].what;
    EXPECT_NE(found[r].what.find("rank 2"), std::string::npos) << found[r].what;
  }
}

}  // namespace
}  // namespace zero::testing
