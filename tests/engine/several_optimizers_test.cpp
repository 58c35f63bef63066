// Several models and optimizers in one process: over one communicator, over splits, one after the
// other; each with its own bytes, errors and bits.
#include <atomic>
#include <optional>
#include <vector>

#include <gtest/gtest.h>

#include "tests/support/ranks.h"

namespace zero::testing {
namespace {

float one(ParameterId, std::size_t) {
  return 1.0F;
}

Element by_rank(int rank) {
  return [rank](ParameterId p, std::size_t i) {
    return static_cast<float>((index(p) + i) % 5) - static_cast<float>(rank);
  };
}

class SeveralOptimizers : public StagesAndWorlds {
 protected:
  static std::uint64_t alone(const ModelSpec& model, int ranks, int steps) {
    std::atomic<std::uint64_t> hash = 0;
    run_each(ranks, model, options(), [&](Rank& rank) {
      for (int step = 0; step < steps; ++step) {
        train_step(rank.optimizer, by_rank(rank.rank()));
      }
      hash = rank.optimizer.state_hash();
    });
    return hash;
  }
};
INSTANTIATE_TEST_SUITE_P(All, SeveralOptimizers, every_case(), case_name);

TEST_P(SeveralOptimizers, OverSplitsOfOneCommunicatorTrainAsIfAlone) {
  const ModelSpec model = plain_model({7, 300}, {.lr = 1e-2});
  const std::uint64_t right = alone(model, world(), 3);
  std::atomic<int> checked = 0;
  run_ranks(2 * world(), [&](Communicator& all) {
    const auto half = all.split(all.rank() % 2, all.rank());
    EXPECT_EQ(half->world(), world());
    Rank rank(model, options(), *half);
    // One half runs a step more: the halves have nothing to do with each other.
    for (int step = 0; step < 3; ++step) {
      train_step(rank.optimizer, by_rank(half->rank()));
    }
    EXPECT_EQ(rank.optimizer.state_hash(), right);
    if (all.rank() % 2 == 1) {
      train_step(rank.optimizer, one);
    }
    ++checked;
  });
  EXPECT_EQ(checked, 2 * world());
}

// Their micro-batches and steps interleave call by call.
TEST_P(SeveralOptimizers, MayInterleaveOnOneDevice) {
  const ModelSpec small = plain_model({7}, {.lr = 1e-2}), large = plain_model({300, 5, 900});
  const std::uint64_t right_small = alone(small, world(), 2),
                      right_large = alone(large, world(), 2);
  run_ranks(world(), [&](Communicator& ranks) {
    const auto other = ranks.split(0, ranks.rank());
    const auto device = make_cpu_backend();
    const World shard{.shard_ranks = ranks.world()};
    Optimizer a(make_plan(small, options(), shard), *device, {ranks});
    Optimizer b(make_plan(large, options(), shard), *device, {*other});
    a.initialize(initial_values);
    b.initialize(initial_values);
    for (int step = 0; step < 2; ++step) {
      MicroBatch of_b = b.begin_micro_batch({.last = Last::kYes});
      MicroBatch of_a = a.begin_micro_batch({.last = Last::kYes});
      write(b, of_b, parameter(2), by_rank(ranks.rank()));
      of_b.ready(unit(2), kHost);
      write(a, of_a, parameter(0), by_rank(ranks.rank()));
      of_a.ready(unit(0), kHost);
      PendingStep pending = a.step();
      for (const std::size_t p : {1U, 0U}) {
        const ParameterLease of_a_again = a.parameters(unit(0), kHost);
        write(b, of_b, parameter(p), by_rank(ranks.rank()));
        of_b.ready(unit(p), kHost);
      }
      EXPECT_TRUE(b.step().get().applied);
      EXPECT_TRUE(pending.get().applied);
    }
    EXPECT_EQ(a.state_hash(), right_small);
    EXPECT_EQ(b.state_hash(), right_large);
    EXPECT_EQ(device->usage().peak_bytes,
              a.plan().peak_bytes(ranks.rank()) + b.plan().peak_bytes(ranks.rank()));
  });
}

TEST_P(SeveralOptimizers, OneAfterTheOtherLeaveNothingBehind) {
  run_ranks(world(), [&](Communicator& ranks) {
    const auto device = make_cpu_backend();
    std::vector<std::uint64_t> hashes;
    for (int turn = 0; turn < 3; ++turn) {
      Optimizer optimizer(
          make_plan(odd_model(kBf16WithMaster), options(), {.shard_ranks = ranks.world()}), *device,
          {ranks});
      EXPECT_EQ(device->usage().current_bytes, optimizer.plan().peak_bytes(ranks.rank()));
      optimizer.initialize(initial_values);
      for (int step = 0; step < 2; ++step) {
        train_step(optimizer, by_rank(ranks.rank()));
      }
      hashes.push_back(optimizer.state_hash());
    }
    EXPECT_EQ(hashes, std::vector<std::uint64_t>(3, hashes[0]));
    EXPECT_EQ(device->usage().current_bytes, 0U);
    EXPECT_EQ(device->usage().host_bytes, 0U);
  });
}

TEST_P(SeveralOptimizers, MayMoveWhileLeasesAndMicroBatchesAreOpen) {
  run_each(world(), plain_model({7, 300}), options(), [](Rank& rank) {
    std::optional micro = rank.optimizer.begin_micro_batch({.last = Last::kYes});
    write(rank.optimizer, *micro, parameter(1), one);
    Optimizer moved = std::move(rank.optimizer);
    {
      const ParameterLease lease = moved.parameters(unit(0), kHost);
      micro->ready(unit(1), kHost);
      write(moved, *micro, parameter(0), one);
      micro->ready(unit(0), kHost);
    }
    Optimizer again = std::move(moved);
    EXPECT_TRUE(again.step().get().applied);
    EXPECT_EQ(again.step_count(parameter(0)), 1);
    micro.reset();  // before its optimizer
  });
}

// An error in one split is none in the other.
TEST_P(SeveralOptimizers, ThatWereMovedFromRefuseEveryCall) {
  run_each(world(), plain_model({7, 300}), options(), [](Rank& rank) {
    const auto expect_refused = [](auto&& call, const std::string& what) {
      try {
        call();
        ADD_FAILURE() << what << " was used";
      } catch (const UsageError& error) {
        EXPECT_NE(std::string(error.what()).find(what + " that was moved from"), std::string::npos);
      }
    };
    ParameterLease lease = rank.optimizer.parameters(unit(0), kHost);
    {
      const ParameterLease moved = std::move(lease);
      expect_refused([&] { (void)lease.data<float>(parameter(0)); }, "ParameterLease");
    }
    {
      MicroBatch micro = rank.optimizer.begin_micro_batch();
      {
        GradientLease gradient = micro.gradients(unit(0), kHost);
        const GradientLease moved = std::move(gradient);
        expect_refused([&] { (void)gradient.data<float>(parameter(0)); }, "GradientLease");
      }
      MicroBatch kept = std::move(micro);
      expect_refused([&] { micro.ready(unit(0), kHost); }, "MicroBatch");
      kept.abandon();
    }
    Optimizer optimizer = std::move(rank.optimizer);
    expect_refused([&] { rank.optimizer.abandon_step(); }, "Optimizer");
    train_step(optimizer, by_rank(rank.rank()));
  });
}

TEST_P(SeveralOptimizers, OverDisjointSplitsFailApart) {
  const ModelSpec model = plain_model({7, 300});
  std::vector<Ending> found = endings(2 * world(), [&](Communicator& all) {
    const auto half = all.split(all.rank() % 2, all.rank());
    Rank rank(model, options(), *half);
    train_step(rank.optimizer, one);
    if (all.rank() == 0) {
      rank.optimizer.step();  // of nothing
    }
    for (int step = 0; step < 3; ++step) {
      train_step(rank.optimizer, one);
    }
  });
  for (std::size_t r = 0; r < found.size(); ++r) {
    EXPECT_EQ(found[r].what.empty(), r % 2 == 1) << found[r].what;
  }
}

}  // namespace
}  // namespace zero::testing
