// Wrong sums that users of other systems reported: shared weights, accumulation, stages that
// disagree, averages that were sums.
#include <array>
#include <cmath>

#include <gtest/gtest.h>

#include "tests/support/compare.h"
#include "tests/support/oracle.h"
#include "tests/support/ranks.h"

namespace zero::testing {
namespace {

// A number of its own for each element, rank and use, exact in fp32 in every sum here.
float distinct(int rank, int use, std::size_t element) {
  const float sign = element % 2 == 0 ? 1.0F : -1.0F;
  return sign * std::ldexp(static_cast<float>(1 + 2 * rank + use), static_cast<int>(element % 5));
}

class B007 : public StagesAndWorlds {
 protected:
  // rows = W * q + 1, with shard borders inside the parameter.
  static std::size_t rows() { return static_cast<std::size_t>(world()) * 90 + 1; }
  static ModelSpec tied_model(GradientLife life) {
    ModelSpec model;
    const GroupId group = model.add_group("all", {.hyper = kHyper});
    model.add(model.add_unit("embedding", life), "wte", {rows(), 3}, group);
    model.add(model.add_unit("body"), "w", {17}, group);
    return model;
  }
  // The head's use first, as backward reaches it, and the embedding's last.
  static void use_twice(Rank& rank) {
    MicroBatch micro = rank.optimizer.begin_micro_batch({.last = Last::kYes});
    const auto add_use = [&](int use) {
      write(
          rank.optimizer, micro, parameter(0),
          [&](ParameterId, std::size_t i) { return distinct(rank.rank(), use, i); }, Write::kAdd);
    };
    add_use(0);
    write(rank.optimizer, micro, parameter(1), [](ParameterId, std::size_t) { return 1.0F; });
    micro.ready(unit(1), kHost);
    add_use(1);
    micro.ready(unit(0), kHost);
    EXPECT_TRUE(rank.optimizer.step().get().applied);
  }
  static constexpr Hyper kHyper{.lr = 1e-2, .weight_decay = 0.1};
};
INSTANTIATE_TEST_SUITE_P(All, B007, every_case(), case_name);

TEST_P(B007, EveryElementOfASharedWeightIsUpdatedByBothUses) {
  for (const GradientLife life : {GradientLife::kUntilReady, GradientLife::kBucket}) {
    run_each(world(), tied_model(life), options(), [](Rank& rank) {
      use_twice(rank);
      const std::vector<float> found = read(rank.optimizer, parameter(0));
      std::vector<float> initial(found.size());
      initial_values(parameter(0), 0, initial);
      const Tensors gradient = whole(rank, Values::kGradients);
      for (std::size_t i = 0; i < found.size(); ++i) {
        double sum = 0;
        for (int r = 0; r < rank.world(); ++r) {
          sum += static_cast<double>(distinct(r, 0, i) + distinct(r, 1, i));
        }
        ASSERT_EQ(gradient[0][i], static_cast<float>(sum) / static_cast<float>(rank.world()));
        ASSERT_NE(found[i], initial[i]) << "element " << i << " never moved";
        AdamElement right{.w = static_cast<double>(initial[i])};
        right.step(sum / rank.world(), kHyper);
        ASSERT_NEAR(found[i], right.w, 1e-6) << "element " << i;
      }
    });
  }
}

TEST_P(B007, BothUsesReadTheSameStorage) {
  run_each(world(), tied_model(GradientLife::kUntilReady), options(), [](Rank& rank) {
    const ParameterLease head = rank.optimizer.parameters(unit(0), kHost);
    const ParameterLease embedding = rank.optimizer.parameters(unit(0), kHost);
    EXPECT_EQ(head.data<float>(parameter(0)), embedding.data<float>(parameter(0)));
  });
}

class B008 : public StagesAndWorlds {};
INSTANTIATE_TEST_SUITE_P(All, B008, every_case(), case_name);

// 1, 10, 100, 1000 times a factor per rank and element; the number of micro-batches changes.
TEST_P(B008, EveryMicroBatchCountsAtAnyAccumulation) {
  for (const Numerics numerics :
       {Numerics::kFast, Numerics::kStageInvariant, Numerics::kWorldInvariant}) {
    Options choice = options();
    choice.numerics = numerics;
    choice.max_micro_batches = 4;
    choice.bucket_bytes = 100;
    run_each(world(), plain_model({5, 700, 1}), choice, [](Rank& rank) {
      for (const int count : {4, 1, 3, 4}) {
        double scale = 1, sum = 0;
        for (int k = 0; k < count; ++k, scale *= 10) {
          const Last last = k + 1 == count ? Last::kYes : Last::kNo;
          run_micro_batch(
              rank.optimizer,
              [&](ParameterId, std::size_t i) {
                return static_cast<float>(scale) * static_cast<float>(rank.rank() + 1) *
                       (i % 2 == 0 ? 1.0F : -2.0F);
              },
              last);
          sum += scale;
        }
        const StepResult result = rank.optimizer.step().get();
        const double mean = sum * (rank.world() + 1) / 2.0 / count;  // 277.75 * (W + 1) / 2 at 4
        // 3 + 350 + 1 elements of +mean, 2 + 350 of -2 mean.
        EXPECT_NEAR(result.grad_norm / (mean * std::sqrt(354.0 + 4 * 352.0)), 1, 1e-12);
        const Tensors gradient = whole(rank, Values::kGradients);
        const float right = static_cast<float>(sum * (rank.world() + 1) / 2.0 * rank.world()) /
                            static_cast<float>(rank.world() * count);
        for (const std::vector<float>& values : gradient) {
          for (std::size_t i = 0; i < values.size(); ++i) {
            ASSERT_EQ(values[i], i % 2 == 0 ? right : -2 * right) << count << " micro-batches";
          }
        }
      }
    });
  }
}

class B009 : public ::testing::TestWithParam<std::tuple<int, int, double>> {
 private:
  Watchdog watchdog_{std::chrono::seconds(60)};
};
INSTANTIATE_TEST_SUITE_P(All, B009,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4), ::testing::Values(1, 3),
                                            ::testing::Values(0.0, 0.25)));

RunSetup every_oddity(Precision precision, int world, int micro_batches, double clip) {
  RunSetup setup{.model = odd_model(precision),
                 .world = world,
                 .micro_batches = micro_batches,
                 .steps = 8,
                 .snapshots = {1, 8}};
  setup.unused = [model = setup.model](const GradientAt& at) {
    return odd_model_unused(model, at);
  };
  if (clip > 0) {
    setup.options.clip_norm = clip;
  }
  return setup;
}

// With exact sums the order cannot matter, so that kFast must agree over all stages as well.
TEST_P(B009, AllStagesEndInTheSameBitsWithExactGradients) {
  const auto [world, micro_batches, clip] = GetParam();
  for (const Precision precision : {kFloat32Only, kBf16WithMaster}) {
    RunSetup setup = every_oddity(precision, world, micro_batches, clip);
    setup.gradient = exact_gradient;
    setup.hash_each_step = true;
    std::vector<RunResult> results;
    for (const Stage stage :
         {Stage::kReplicated, Stage::kStates, Stage::kGradients, Stage::kParameters}) {
      for (const std::size_t bucket_bytes : {1U, 3000U, 1U << 20U}) {
        setup.options.stage = stage;
        setup.options.bucket_bytes = bucket_bytes;
        results.push_back(run(setup));
      }
    }
    for (const RunResult& other : results) {
      ASSERT_EQ(other.hashes, results[0].hashes);
      EXPECT_EQ("", bit_difference(setup.model, other.parameters, results[0].parameters));
      for (std::size_t step = 0; step < 8; ++step) {
        EXPECT_EQ(other.steps[step].grad_norm, results[0].steps[step].grad_norm);
      }
    }
  }
}

TEST_P(B009, EveryStageStaysAsCloseToDoubleAtStep8AsAtStep1) {
  const auto [world, micro_batches, clip] = GetParam();
  for (const Stage stage :
       {Stage::kReplicated, Stage::kStates, Stage::kGradients, Stage::kParameters}) {
    RunSetup setup = every_oddity(kFloat32Only, world, micro_batches, clip);
    setup.options.stage = stage;
    const RunResult found = run(setup);
    const OracleResult<double> right = right_values(setup);
    const double first = largest_error(found.snapshots.at(1), right.snapshots.at(1));
    const double last = largest_error(found.snapshots.at(8), right.snapshots.at(8));
    EXPECT_LE(first, 1e-6);
    EXPECT_LE(last, 1e-6);
    for (std::size_t step = 0; step < 8; ++step) {
      EXPECT_NEAR(found.steps[step].grad_norm / right.norms[step], 1, 1e-6);
    }
    EXPECT_EQ(found.step_counts, right.step_counts);
  }
}

class B010 : public StagesAndWorlds {};
INSTANTIATE_TEST_SUITE_P(All, B010, every_case(), case_name);

// Ranks give 1, 3, 5, ...: the mean is W and the sum W * W; micro-batches are averaged, tokens sum.
TEST_P(B010, TheGradientIsTheMeanOverRanksUnlessTokensSayOtherwise) {
  for (const Precision precision : {kFloat32Only, kBf16WithMaster}) {
    const ModelSpec model = plain_model({1, 0, 300}, {}, precision);
    run_each(world(), model, options(), [](Rank& rank) {
      const Element mine = [&](ParameterId, std::size_t) {
        return static_cast<float>(2 * rank.rank() + 1);
      };
      const auto w = static_cast<float>(rank.world());
      EXPECT_DOUBLE_EQ(train_step(rank.optimizer, mine).grad_norm,
                       std::sqrt(301.0 * rank.world() * rank.world()));
      EXPECT_EQ(whole(rank, Values::kGradients), (Tensors{{w}, {}, std::vector<float>(300, w)}));
      // Two tokens on each rank: W * W / (2 * W).
      train_step(rank.optimizer, mine, {.local_tokens = 2});
      EXPECT_EQ(whole(rank, Values::kGradients),
                (Tensors{{w / 2}, {}, std::vector<float>(300, w / 2)}));
    });
  }
}

// The collectives themselves sum and never average, whatever the dtype, shards of 0 and 1 included.
TEST_P(B010, CollectivesSumInEveryDtype) {
  run_ranks(world(), [](Communicator& ranks) {
    const auto device = make_cpu_backend();
    const auto w = static_cast<std::size_t>(ranks.world());
    const On on{.backend = *device, .stream = kHost, .deadline = scaled(std::chrono::seconds(15))};
    const auto one = static_cast<float>(2 * ranks.rank() + 1);
    const auto right = static_cast<float>(w * w);
    for (const std::size_t n : {0U, 1U, 3U}) {
      const std::vector<float> single(w * n, one);
      const std::vector<bf16> low(w * n, to_bf16(one));
      const std::vector<std::int64_t> integer(w * n, 2 * ranks.rank() + 1);
      std::vector<float> from_single(n), from_low(n), reduced(w * n);
      std::vector<std::int64_t> from_integer(n);
      const std::array<Transfer, 3> scatter{
          Transfer{single.data(), from_single.data(), n, DType::kFloat32},
          Transfer{low.data(), from_low.data(), n, DType::kBfloat16},
          Transfer{integer.data(), from_integer.data(), n, DType::kInt64}};
      device->host_wait(ranks.reduce_scatter(scatter, SumOrder::kTree, on));
      const std::array<Transfer, 1> reduce{
          Transfer{single.data(), reduced.data(), w * n, DType::kFloat32}};
      device->host_wait(ranks.all_reduce(reduce, on));
      EXPECT_EQ(from_single, std::vector<float>(n, right));
      EXPECT_EQ(from_low, std::vector<float>(n, right));
      EXPECT_EQ(from_integer, std::vector<std::int64_t>(n, static_cast<std::int64_t>(w * w)));
      EXPECT_EQ(reduced, std::vector<float>(w * n, right));
    }
  });
}

TEST_P(B010, AnUnsupportedSumIsRefusedLoudly) {
  run_ranks(world(), [](Communicator& ranks) {
    const auto device = make_cpu_backend();
    const On on{.backend = *device, .stream = kHost, .deadline = scaled(std::chrono::seconds(15))};
    std::vector<bf16> low(static_cast<std::size_t>(ranks.world()));
    const std::array<Transfer, 1> transfer{
        Transfer{low.data(), low.data(), low.size(), DType::kBfloat16}};
    EXPECT_THROW((void)ranks.all_reduce(transfer, on), UsageError);
    const std::array<Transfer, 1> half{Transfer{low.data(), low.data(), 1, DType::kFloat16}};
    EXPECT_THROW((void)ranks.reduce_scatter(half, SumOrder::kTree, on), UsageError);
  });
}

}  // namespace
}  // namespace zero::testing
