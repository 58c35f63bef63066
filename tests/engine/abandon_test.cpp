// Abandoned steps leave no trace: the next step's bits are those of a run without them.
#include <array>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "tests/support/ranks.h"

namespace zero::testing {
namespace {

constexpr std::size_t kUnits = 5;

ModelSpec model_with_every_life() {
  ModelSpec model;
  const GroupId all = model.add_group("all", {.hyper = {.lr = 1e-2, .weight_decay = 0.1}});
  const GroupId low = model.add_group("low", {.precision = kBf16WithMaster});
  model.add(model.add_unit("tied", GradientLife::kUntilReady), "w", {311}, all);
  model.add(model.add_unit("a"), "w", {5}, all);
  model.add(model.add_unit("b"), "w", {3000}, low);
  model.add(model.add_unit("c"), "w", {}, all);
  model.add(model.add_unit("d"), "w", {700}, all);
  return model;
}

class Abandon : public StagesAndWorlds {
 protected:
  // Rounds in every sum; of a kind that would show if a part of it stayed behind.
  static Element gradient(int rank, std::int64_t step, std::int64_t micro) {
    return [=](ParameterId p, std::size_t i) {
      std::array<float, 1> out{};
      random_gradient({4 * step + micro, 8 * static_cast<std::int64_t>(i) + rank, p}, out);
      return out[0];
    };
  }
  static Options choice(Numerics numerics, int open) {
    Options out = options();
    out.numerics = numerics;
    out.max_micro_batches = 2;
    out.max_open_micro_batches = open;
    out.bucket_bytes = 2000;
    out.buckets = 3;
    out.clip_norm = 0.5;
    return out;
  }
  static void train(Rank& rank, std::int64_t step) {
    for (const std::int64_t micro : {0, 1}) {
      run_micro_batch(rank.optimizer, gradient(rank.rank(), step, micro),
                      micro == 1 ? Last::kYes : Last::kNo);
    }
    EXPECT_TRUE(rank.optimizer.step().get().applied);
  }
  // Writes and readies the last `count` units of the micro-batch.
  static void start_backward(Rank& rank, MicroBatch& micro, const Element& value,
                             std::size_t count) {
    for (std::size_t u = kUnits; u-- > kUnits - count;) {
      write(rank.optimizer, micro, parameter(u), value);
      micro.ready(unit(u), kHost);
    }
  }
  // Two steps with whatever `between` does after the first. Returns: the digest after each
  static std::vector<std::uint64_t> hashes(const Options& options,
                                           const std::function<void(Rank&)>& between) {
    std::vector<std::uint64_t> out;
    run_each(world(), model_with_every_life(), options, [&](Rank& rank) {
      const auto keep = [&] {
        const std::uint64_t hash = rank.optimizer.state_hash();
        if (rank.rank() == 0) {
          out.push_back(hash);
        }
      };
      train(rank, 0);
      keep();
      const Snapshot before = snapshot(rank);
      between(rank);
      EXPECT_EQ(snapshot(rank), before);
      train(rank, 1);
      keep();
      train(rank, 2);
      keep();
    });
    return out;
  }
};
INSTANTIATE_TEST_SUITE_P(All, Abandon, every_case(), case_name);

TEST_P(Abandon, InTheSecondBackwardLeavesNoTrace) {
  for (const Numerics numerics :
       {Numerics::kFast, Numerics::kStageInvariant, Numerics::kWorldInvariant}) {
    const auto right = hashes(choice(numerics, 1), [](Rank&) {});
    for (const Last last : {Last::kNo, Last::kYes}) {
      for (std::size_t count = 0; count < kUnits; ++count) {
        const auto found = hashes(choice(numerics, 1), [&](Rank& rank) {
          run_micro_batch(rank.optimizer, gradient(rank.rank(), 7, 0), Last::kNo);
          MicroBatch second = rank.optimizer.begin_micro_batch({.last = last});
          start_backward(rank, second, gradient(rank.rank(), 7, 1), count);
          // One unit written and not ready.
          write(rank.optimizer, second, parameter(kUnits - 1 - count), gradient(rank.rank(), 7, 1));
          second.abandon();
        });
        EXPECT_EQ(found, right) << name_of(numerics) << ", after " << count << " units";
      }
    }
  }
}

TEST_P(Abandon, WithTwoOpenLeavesNoTrace) {
  for (const Numerics numerics : {Numerics::kFast, Numerics::kWorldInvariant}) {
    const auto right = hashes(choice(numerics, 2), [](Rank&) {});
    const auto found = hashes(choice(numerics, 2), [](Rank& rank) {
      MicroBatch first = rank.optimizer.begin_micro_batch();
      MicroBatch second = rank.optimizer.begin_micro_batch();
      start_backward(rank, first, gradient(rank.rank(), 7, 0), 3);
      start_backward(rank, second, gradient(rank.rank(), 7, 1), 2);
      second.abandon();
    });
    EXPECT_EQ(found, right) << name_of(numerics);
  }
}

TEST_P(Abandon, OfCompleteMicroBatchesLeavesNoTrace) {
  const auto right = hashes(choice(Numerics::kFast, 1), [](Rank&) {});
  const auto found = hashes(choice(Numerics::kFast, 1), [](Rank& rank) {
    run_micro_batch(rank.optimizer, gradient(rank.rank(), 7, 0), Last::kNo);
    rank.optimizer.abandon_step();
    run_micro_batch(rank.optimizer, gradient(rank.rank(), 7, 0), Last::kNo);
    run_micro_batch(rank.optimizer, gradient(rank.rank(), 7, 1), Last::kYes);
    rank.optimizer.abandon_step();
    rank.optimizer.abandon_step();  // of nothing
  });
  EXPECT_EQ(found, right);
}

// What was marked or used in the abandoned step counts for nothing.
TEST_P(Abandon, ForgetsWhatWasUsed) {
  run_each(world(), model_with_every_life(), options(), [](Rank& rank) {
    run_micro_batch(rank.optimizer, gradient(rank.rank(), 0, 0));
    rank.optimizer.abandon_step();
    const Snapshot before = snapshot(rank);
    run_micro_batch(rank.optimizer, gradient(rank.rank(), 0, 0), Last::kYes,
                    [](ParameterId p) { return index(p) != 2; });
    EXPECT_TRUE(rank.optimizer.step().get().applied);
    const Snapshot after = snapshot(rank);
    EXPECT_EQ(after.step_counts, (std::vector<std::int64_t>{1, 1, 0, 1, 1}));
    EXPECT_EQ(after.master[2], before.master[2]);
  });
}

// A non-finite gradient, too: it was never looked at.
TEST_P(Abandon, ForgetsANonFiniteGradient) {
  const auto right = hashes(choice(Numerics::kFast, 1), [](Rank&) {});
  const auto found = hashes(choice(Numerics::kFast, 1), [](Rank& rank) {
    run_micro_batch(
        rank.optimizer, [](ParameterId, std::size_t) { return std::nanf(""); }, Last::kNo);
    rank.optimizer.abandon_step();
  });
  EXPECT_EQ(found, right);
}

// Reductions that were enqueued, and writers on streams that are still at work, are waited for.
TEST_P(Abandon, WaitsForWhoeverStillWrites) {
  const auto right = hashes(choice(Numerics::kStageInvariant, 1), [](Rank&) {});
  const auto found = hashes(choice(Numerics::kStageInvariant, 1), [](Rank& rank) {
    const StreamRef stream = rank.device->make_stream();
    MicroBatch micro = rank.optimizer.begin_micro_batch();
    for (std::size_t u = kUnits; u-- > 0;) {
      GradientLease lease = micro.gradients(unit(u), stream);
      const std::size_t count = model_with_every_life().parameters()[u].count;
      void* out = u == 2 ? static_cast<void*>(lease.data<bf16>(parameter(u)))
                         : static_cast<void*>(lease.data<float>(parameter(u)));
      rank.device->call(stream, [out, bytes = count * (u == 2 ? 2 : 4)] {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        std::memset(out, 0x3f, bytes);
      });
      { const GradientLease closed = std::move(lease); }
      if (u > 1) {
        micro.ready(unit(u), stream);
      }
    }
    micro.abandon();
    rank.device->release_stream(stream);
  });
  EXPECT_EQ(found, right);
}

TEST_P(Abandon, MayHappenWithAParameterLeaseOpen) {
  run_each(world(), model_with_every_life(), options(), [](Rank& rank) {
    MicroBatch micro = rank.optimizer.begin_micro_batch();
    const Tensors before = read_all(rank.optimizer);
    {
      const ParameterLease lease = rank.optimizer.parameters(unit(1), kHost);
      micro.abandon();
      EXPECT_EQ(lease.data<float>(parameter(1))[4], before[1][4]);
    }
    EXPECT_TRUE(train_step(rank.optimizer, gradient(rank.rank(), 0, 0)).applied);
  });
}

TEST_P(Abandon, EndsTheMicroBatchesItDropped) {
  const std::vector<Ending> found = endings(world(), [&](Communicator& communicator) {
    Rank rank(model_with_every_life(), options(), communicator);
    MicroBatch micro = rank.optimizer.begin_micro_batch();
    micro.abandon();
    micro.ready(unit(4), kHost);
  });
  for (const Ending& end : found) {
    EXPECT_NE(end.what.find("use of a micro-batch that is complete, abandoned"), std::string::npos)
        << end.what;
  }
}

}  // namespace
}  // namespace zero::testing
