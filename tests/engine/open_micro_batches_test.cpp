// Several micro-batches open at once, as a 1F1B pipeline has them.
#include <array>
#include <atomic>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/support/ranks.h"

namespace zero::testing {
namespace {

constexpr std::size_t kUnits = 5;

// Two small units share a bucket; one is tied, one is large, one is a scalar.
ModelSpec pipeline_model() {
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

class OpenMicroBatches : public StagesAndWorlds {
 protected:
  // Rounds in every sum, so that an order that differs shows.
  static Element gradient(int rank, std::size_t micro) {
    return [rank, micro](ParameterId p, std::size_t i) {
      std::array<float, 1> out{};
      random_gradient(
          {static_cast<std::int64_t>(i), static_cast<std::int64_t>(4 * micro) + rank, p}, out);
      return out[0];
    };
  }
  static Options several(int open, Numerics numerics = Numerics::kStageInvariant) {
    Options out = options();
    out.max_open_micro_batches = open;
    out.max_micro_batches = 4;
    out.buckets = 4;
    out.bucket_bytes = 6000;
    out.numerics = numerics;
    return out;
  }
  // An action of the pipeline: begin a micro-batch, or make one unit of one ready.
  struct Action {
    std::size_t micro = 0;
    std::optional<std::size_t> ready{};
  };
  static std::vector<Action> backward(std::size_t micro, std::vector<std::size_t> units) {
    std::vector<Action> out;
    for (const std::size_t u : units) {
      out.push_back({micro, u});
    }
    return out;
  }
  // Runs two steps of the same actions. Returns: the digest, the same on all ranks
  static std::uint64_t run_actions(const Options& options, const std::vector<Action>& actions) {
    std::atomic<std::uint64_t> hash = 0;
    run_each(world(), pipeline_model(), options, [&](Rank& rank) {
      for (int step = 0; step < 2; ++step) {
        std::vector<MicroBatch> open;
        for (const Action& action : actions) {
          if (!action.ready) {
            EXPECT_EQ(open.size(), action.micro);
            open.push_back(rank.optimizer.begin_micro_batch());
          } else {
            write(rank.optimizer, open[action.micro], parameter(*action.ready),
                  gradient(rank.rank(), action.micro));
            open[action.micro].ready(unit(*action.ready), kHost);
          }
        }
        EXPECT_TRUE(rank.optimizer.step().get().applied);
      }
      hash = rank.optimizer.state_hash();
    });
    return hash;
  }
  static std::vector<Action> join(std::initializer_list<std::vector<Action>> parts) {
    std::vector<Action> out;
    for (const std::vector<Action>& part : parts) {
      out.insert(out.end(), part.begin(), part.end());
    }
    return out;
  }
  static std::vector<Action> begin(std::size_t micro) { return {{micro, std::nullopt}}; }
};
INSTANTIATE_TEST_SUITE_P(All, OpenMicroBatches, every_case(), case_name);

// 1F1B with one micro-batch in flight ahead: begun early, backward in order.
TEST_P(OpenMicroBatches, SumInTheOrderOfReadyWhateverTheOrderOfBegin) {
  for (const Numerics numerics :
       {Numerics::kFast, Numerics::kStageInvariant, Numerics::kWorldInvariant}) {
    const std::vector<std::size_t> order{4, 3, 2, 1, 0};
    const std::uint64_t sequential =
        run_actions(several(1, numerics), join({begin(0), backward(0, order), begin(1),
                                                backward(1, order), begin(2), backward(2, order)}));
    const std::uint64_t overlapped =
        run_actions(several(2, numerics), join({begin(0), begin(1), backward(0, order), begin(2),
                                                backward(1, order), backward(2, order)}));
    EXPECT_EQ(overlapped, sequential) << name_of(numerics);
  }
}

// The second micro-batch's backward follows the first's unit by unit.
TEST_P(OpenMicroBatches, MayInterleaveTheirBackwards) {
  const std::uint64_t sequential = run_actions(
      several(1),
      join({begin(0), backward(0, {4, 3, 2, 1, 0}), begin(1), backward(1, {4, 3, 2, 1, 0})}));
  const std::uint64_t interleaved = run_actions(
      several(2), join({begin(0), begin(1), backward(0, {4, 3}), backward(1, {4}), backward(0, {2}),
                        backward(1, {3, 2}), backward(0, {1, 0}), backward(1, {1, 0})}));
  EXPECT_EQ(interleaved, sequential);
}

// Unit by unit the later micro-batch comes first: its sum comes first too.
TEST_P(OpenMicroBatches, AreSummedInReverseWhenReadyInReverse) {
  const std::vector<std::size_t> order{4, 3, 2, 1, 0};
  const auto reversed =
      run_actions(several(2), join({begin(0), begin(1), backward(1, order), backward(0, order)}));
  const auto plain =
      run_actions(several(2), join({begin(0), begin(1), backward(0, order), backward(1, order)}));
  // Two addends commute: only a third would show the order.
  EXPECT_EQ(reversed, plain);
  const auto third = join({begin(0), begin(1), begin(2)});
  EXPECT_EQ(run_actions(several(3),
                        join({third, backward(2, order), backward(0, order), backward(1, order)})),
            run_actions(several(3),
                        join({third, backward(0, order), backward(2, order), backward(1, order)})));
  EXPECT_NE(run_actions(several(3),
                        join({third, backward(2, order), backward(1, order), backward(0, order)})),
            run_actions(several(3),
                        join({third, backward(0, order), backward(1, order), backward(2, order)})));
}

// Units 3 and 1 share a bucket; each micro-batch has one of them first. Each bucket would wait for
// the other: it must come out right or be refused, and never lose a gradient.
TEST_P(OpenMicroBatches, ThatBecomeReadyCrosswiseAreNeverWrong) {
  Options roomy = several(2);
  roomy.bucket_bytes = 1U << 20U;
  const std::vector<Ending> found = endings(world(), [&](Communicator& communicator) {
    Rank rank(pipeline_model(), roomy, communicator);
    MicroBatch first = rank.optimizer.begin_micro_batch();
    MicroBatch second = rank.optimizer.begin_micro_batch();
    const auto give = [&](MicroBatch& micro, std::size_t p, float value) {
      write(rank.optimizer, micro, parameter(p), [&](ParameterId, std::size_t) { return value; });
      micro.ready(unit(p), kHost);
    };
    give(first, 3, 2);
    give(second, 1, 4);
    give(second, 3, 4);
    give(first, 1, 2);
    for (const std::size_t p : {4U, 2U, 0U}) {
      give(first, p, 2);
      give(second, p, 4);
    }
    EXPECT_TRUE(rank.optimizer.step().get().applied);
    for (const std::vector<float>& values : whole(rank, Values::kGradients)) {
      EXPECT_EQ(values, std::vector<float>(values.size(), 3.0F));
    }
  });
  for (const Ending& end : found) {
    EXPECT_TRUE(end.what.empty() || end.what.find("'c'") != std::string::npos ||
                end.what.find("'a'") != std::string::npos)
        << end.what;
  }
}

TEST_P(OpenMicroBatches, AreAsManyAsTheOptionsSay) {
  const std::vector<Ending> found = endings(world(), [&](Communicator& communicator) {
    Rank rank(pipeline_model(), several(2), communicator);
    const MicroBatch first = rank.optimizer.begin_micro_batch();
    const MicroBatch second = rank.optimizer.begin_micro_batch();
    const MicroBatch third = rank.optimizer.begin_micro_batch();
  });
  for (const Ending& end : found) {
    EXPECT_NE(end.what.find("begin_micro_batch() with 2 open"), std::string::npos) << end.what;
    EXPECT_NE(end.what.find("'tied'"), std::string::npos) << end.what;
    EXPECT_NE(end.what.find("max_open_micro_batches"), std::string::npos) << end.what;
  }
}

}  // namespace
}  // namespace zero::testing
