// Steps that are enqueued, waited for or not, and what they report.
#include <array>
#include <atomic>
#include <cmath>
#include <limits>
#include <optional>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "tests/support/hooked_backend.h"
#include "tests/support/ranks.h"

namespace zero::testing {
namespace {

float one(ParameterId, std::size_t) {
  return 1.0F;
}

class PendingSteps : public StagesAndWorlds {
 protected:
  static ModelSpec model() { return plain_model({7, 300, 5}, {.lr = 1e-2, .weight_decay = 0.1}); }
};
INSTANTIATE_TEST_SUITE_P(All, PendingSteps, every_case(), case_name);

TEST_P(PendingSteps, MayBeDropped) {
  std::vector<std::uint64_t> hashes;
  for (const bool drop : {false, true}) {
    run_each(world(), model(), options(), [&](Rank& rank) {
      for (int step = 0; step < 5; ++step) {
        run_micro_batch(rank.optimizer, one);
        PendingStep pending = rank.optimizer.step();
        if (!drop) {
          EXPECT_TRUE(pending.get().applied);
        }
      }
      const std::uint64_t hash = rank.optimizer.state_hash();
      if (rank.rank() == 0) {
        hashes.push_back(hash);
      }
    });
  }
  EXPECT_EQ(hashes[0], hashes[1]);
}

TEST_P(PendingSteps, MayBeAskedLateInAnyOrderAndTwice) {
  run_each(world(), model(), options(), [](Rank& rank) {
    std::vector<PendingStep> pending;
    for (int step = 0; step < 4; ++step) {
      run_micro_batch(rank.optimizer,
                      [&](ParameterId, std::size_t) { return static_cast<float>(step + 1); });
      pending.push_back(rank.optimizer.step());
    }
    for (const std::size_t step : {3U, 0U, 2U, 1U, 3U}) {
      const StepResult result = pending[step].get();
      EXPECT_TRUE(pending[step].done());
      EXPECT_TRUE(result.applied);
      EXPECT_NEAR(result.grad_norm / (static_cast<double>(step + 1) * std::sqrt(312.0)), 1, 1e-15);
    }
    PendingStep moved = std::move(pending[0]);
    pending[1] = std::move(moved);
    EXPECT_NEAR(pending[1].get().grad_norm, std::sqrt(312.0), 1e-13);
    EXPECT_THROW((void)pending[0].get(), UsageError);
    EXPECT_THROW((void)pending[0].done(), UsageError);
  });
}

TEST_P(PendingSteps, OutliveTheOptimizerAndItsDevice) {
  run_ranks(world(), [&](Communicator& communicator) {
    std::optional<PendingStep> pending;
    {
      Rank rank(model(), options(), communicator);
      run_micro_batch(rank.optimizer, one);
      pending.emplace(rank.optimizer.step());
    }
    EXPECT_TRUE(pending->done());
    EXPECT_NEAR(pending->get().grad_norm, std::sqrt(312.0), 1e-13);
  });
}

// The step is enqueued behind work that has not ended: step() returns, done() is false.
TEST_P(PendingSteps, DoNotBlockTheHost) {
  run_ranks(world(), [&](Communicator& communicator) {
    const auto ledger = make_cpu_backend();
    HookedBackend device(*ledger);
    std::atomic<bool> open = true;
    device.before_prepare = [&](const UpdateArguments&) {
      while (!open) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    };
    Optimizer optimizer(make_plan(model(), options(), {.shard_ranks = communicator.world()}),
                        device, {communicator});
    optimizer.initialize(initial_values);
    EXPECT_TRUE(train_step(optimizer, one).applied);
    open = false;
    run_micro_batch(optimizer, one);
    PendingStep pending = optimizer.step();
    EXPECT_FALSE(pending.done());
    open = true;
    EXPECT_TRUE(pending.get().applied);
    EXPECT_TRUE(pending.done());
  });
}

TEST_P(PendingSteps, ReportWhatHappened) {
  run_each(world(), model(), options(), [](Rank& rank) {
    run_micro_batch(rank.optimizer, one);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    const StepResult first = rank.optimizer.step().get();
    EXPECT_TRUE(first.applied);
    EXPECT_FALSE(first.first_non_finite.has_value());
    EXPECT_EQ(first.owner, -1);
    EXPECT_GE(first.step_ms, 2.0);
    const StepResult second = train_step(rank.optimizer, one);
    EXPECT_EQ(second.wire_bytes, rank.optimizer.statistics().wire_bytes - first.wire_bytes);
    EXPECT_EQ(second.wire_bytes > 0, rank.world() > 1);
    EXPECT_EQ(rank.optimizer.statistics().steps, 2U);
    // In p.1 and in p.2, on the last rank: the lowest parameter is reported, and who found it.
    const StepResult skipped = train_step(rank.optimizer, [&](ParameterId p, std::size_t i) {
      return rank.rank() == rank.world() - 1 && index(p) > 0 && i == 3 ? std::nanf("") : 1.0F;
    });
    EXPECT_FALSE(skipped.applied);
    EXPECT_TRUE(std::isnan(skipped.grad_norm));
    EXPECT_EQ(skipped.first_non_finite, parameter(1));
    EXPECT_EQ(skipped.owner, 0);  // whose shard has p.1[3]
    EXPECT_EQ(rank.optimizer.statistics().steps, 3U);
    EXPECT_EQ(rank.optimizer.step_count(parameter(0)), 2);
  });
}

// A sum that overflows although every contribution is finite.
TEST_P(PendingSteps, SkipWhenTheSumOverflows) {
  run_each(world(), model(), options(), [](Rank& rank) {
    const Snapshot before = snapshot(rank);
    const float most = std::numeric_limits<float>::max();
    const StepResult result =
        train_step(rank.optimizer, [&](ParameterId, std::size_t) { return most; });
    if (rank.world() == 1) {  // finite: squares are summed in double
      EXPECT_TRUE(result.applied);
      EXPECT_NEAR(result.grad_norm / (static_cast<double>(most) * std::sqrt(312.0)), 1, 1e-12);
    } else {
      EXPECT_FALSE(result.applied);
      EXPECT_EQ(result.first_non_finite, parameter(0));
      EXPECT_EQ(snapshot(rank), before);
    }
  });
}

// ---- tokens

TEST_P(PendingSteps, DivideByTheSumOfUnevenTokens) {
  run_each(world(), model(), options(), [](Rank& rank) {
    // 3, 10, 17, 24 tokens; rank 0 none in the second step.
    for (const std::uint64_t at_zero : {3U, 0U}) {
      const auto tokens = [&](int r) {
        return r == 0 ? at_zero : 3 + 7 * static_cast<std::uint64_t>(r);
      };
      std::uint64_t sum = 0;
      double weighted = 0;
      for (int r = 0; r < rank.world(); ++r) {
        sum += tokens(r);
        weighted += static_cast<double>(tokens(r)) * (r + 1);
      }
      // Sums over tokens, each of which has the gradient rank + 1.
      const float mine =
          static_cast<float>(tokens(rank.rank())) * static_cast<float>(rank.rank() + 1);
      const StepResult result =
          train_step(rank.optimizer, [&](ParameterId, std::size_t) { return mine; },
                     {.local_tokens = tokens(rank.rank())});
      if (sum == 0) {  // nobody had any: skipped, and nothing is blamed
        EXPECT_EQ(rank.world(), 1);
        EXPECT_FALSE(result.applied);
        EXPECT_FALSE(result.first_non_finite.has_value());
        continue;
      }
      EXPECT_TRUE(result.applied);
      const float right = static_cast<float>(weighted) / static_cast<float>(sum);
      EXPECT_EQ(whole(rank, Values::kGradients)[1], std::vector<float>(300, right));
      EXPECT_NEAR(result.grad_norm / (weighted / static_cast<double>(sum) * std::sqrt(312.0)), 1,
                  1e-12);
    }
  });
}

TEST_P(PendingSteps, SkipWhenNobodyHadTokens) {
  run_each(world(), model(), options(), [](Rank& rank) {
    EXPECT_TRUE(train_step(rank.optimizer, one, {.local_tokens = 1}).applied);
    const Snapshot before = snapshot(rank);
    const StepResult result = train_step(
        rank.optimizer, [](ParameterId, std::size_t) { return 0.0F; }, {.local_tokens = 0});
    EXPECT_FALSE(result.applied);
    EXPECT_FALSE(result.first_non_finite.has_value());
    EXPECT_EQ(snapshot(rank), before);
    EXPECT_TRUE(train_step(rank.optimizer, one).applied);
  });
}

// ---- choices of one step

TEST_P(PendingSteps, ApplyTheHyperParametersOfEachStep) {
  ModelSpec two;
  const GroupId a = two.add_group("a", {.hyper = {.lr = 1e-2}});
  const GroupId b = two.add_group("b", {.hyper = {.lr = 1e-3}, .precision = kBf16WithMaster});
  const UnitId u = two.add_unit("u");
  two.add(u, "a.w", {300}, a);
  two.add(u, "b.w", {300}, b);
  run_each(world(), two, options(), [&](Rank& rank) {
    std::array<AdamElement, 2> right;
    const Tensors initial = whole(rank, Values::kMaster);
    for (std::size_t p = 0; p < 2; ++p) {
      right.at(p).w = static_cast<double>(initial[p][9]);
    }
    for (int step = 0; step < 6; ++step) {
      Hyper ha = rank.optimizer.hyper(a), hb = rank.optimizer.hyper(b);
      ha.lr = 1e-2 / (step + 1);
      ha.weight_decay = 0.02 * step;
      hb.beta1 = step % 2 == 0 ? 0.9 : 0.5;
      hb.beta2 = step < 3 ? 0.999 : 0.99;
      hb.eps = step == 4 ? 1e-3 : 1e-8;
      rank.optimizer.set(a, ha);
      rank.optimizer.set(b, hb);
      EXPECT_EQ(rank.optimizer.hyper(b), hb);
      const double scale = step == 2 ? 0.5 : 1.0;
      const float g = step % 2 == 0 ? 1.0F : -0.5F;
      train_step(rank.optimizer, [&](ParameterId, std::size_t) { return g; }, {.lr_scale = scale});
      ha.lr *= scale;
      hb.lr *= scale;
      right[0].step(static_cast<double>(g), ha);
      right[1].step(static_cast<double>(g), hb);
      const Tensors found = whole(rank, Values::kMaster);
      EXPECT_NEAR(found[0][9], right[0].w, 1e-7) << step;
      EXPECT_NEAR(found[1][9], right[1].w, 1e-7) << step;
    }
  });
}

TEST_P(PendingSteps, ClipByTheStepsOwnNormIfGiven) {
  Options clipping = options();
  clipping.clip_norm = 1.0;
  run_each(world(), plain_model({16}), clipping, [](Rank& rank) {
    double m = 0;
    for (const std::optional<double> clip : {std::optional<double>{}, std::optional(0.5),
                                             std::optional(100.0), std::optional<double>{}}) {
      const StepResult result = train_step(rank.optimizer, one, {.clip_norm = clip});
      EXPECT_EQ(result.grad_norm, 4.0);
      const double limit = clip.value_or(1.0);
      m = 0.9 * m + 0.1 * (limit < 4 ? limit / (4 + 1e-6) : 1.0);
      const Tensors found = whole_state(rank, "exp_avg");
      EXPECT_NEAR(found[0][15], m, 1e-7);
    }
  });
}

TEST_P(PendingSteps, ThrowTheErrorThatStoppedThem) {
  const std::vector<Ending> found = endings(world(), [&](Communicator& communicator) {
    const auto ledger = make_cpu_backend();
    HookedBackend device(*ledger);
    device.before_prepare = [&](const UpdateArguments&) {
      if (communicator.rank() == 0) {
        throw std::runtime_error("the device fell off the bus");
      }
    };
    std::optional<PendingStep> pending;
    {
      Optimizer optimizer(make_plan(model(), options(), {.shard_ranks = communicator.world()}),
                          device, {communicator});
      optimizer.initialize(initial_values);
      run_micro_batch(optimizer, one);
      pending.emplace(optimizer.step());
      if (communicator.rank() == 0) {
        EXPECT_THROW((void)pending->get(), std::runtime_error);
        EXPECT_THROW((void)optimizer.begin_micro_batch(), std::runtime_error);
      }
    }
    EXPECT_TRUE(pending->done());
    (void)pending->get();  // again, when the optimizer is gone
  });
  EXPECT_EQ(found[0].what, "the device fell off the bus");
  for (std::size_t r = 1; r < found.size(); ++r) {
    // Stages 1 and 2 meet after the update; elsewhere this rank's own step was over.
    EXPECT_TRUE(found[r].what.empty() ||
                found[r].what.find("the device fell off the bus") != std::string::npos)
        << found[r].what;
  }
}

}  // namespace
}  // namespace zero::testing
