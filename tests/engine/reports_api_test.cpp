// Settings lost, pieces forgotten and memory wasted, as users of other systems reported them.
#include <array>
#include <cmath>

#include <gtest/gtest.h>

#include "tests/support/ranks.h"

namespace zero::testing {
namespace {

class B018 : public StagesAndWorlds {
 protected:
  // A: lr 1e-2, decay 0.1, 3 elements; B: lr 1e-3, no decay, 5 elements; interleaved, and large
  // ones of each so that shard borders fall inside parameters.
  static ModelSpec interleaved() {
    ModelSpec model;
    const GroupId a = model.add_group("A", {.hyper = {.lr = 1e-2, .weight_decay = 0.1}});
    const GroupId b = model.add_group("B", {.hyper = {.lr = 1e-3}});
    const UnitId u = model.add_unit("u");
    model.add(u, "a.0", {3}, a);
    model.add(u, "b.0", {5}, b);
    model.add(u, "a.1", {700}, a);
    model.add(u, "b.1", {900}, b);
    return model;
  }
  static void expect_element_by_element(Rank& rank, const std::vector<AdamElement>& right,
                                        const Tensors& initial) {
    const Tensors found = read_all(rank.optimizer);
    for (std::size_t p = 0; p < found.size(); ++p) {
      for (std::size_t i = 0; i < found[p].size(); ++i) {
        // All elements of a parameter move alike but for decay, which right[] has for w = 1.
        ASSERT_NEAR(found[p][i], right[p].w, 1e-6) << p << "[" << i << "]";
      }
    }
    ASSERT_NE(found, initial);
  }
};
INSTANTIATE_TEST_SUITE_P(All, B018, every_case(), case_name);

TEST_P(B018, EachElementFollowsItsOwnGroupFromTheVeryNextStep) {
  const ModelSpec model = interleaved();
  run_ranks(world(), [&](Communicator& communicator) {
    Rank rank(model, options(), communicator, [](ParameterId, std::uint64_t, std::span<float> out) {
      std::fill(out.begin(), out.end(), 1.0F);
    });
    const Tensors initial = read_all(rank.optimizer);
    std::vector<AdamElement> right(4, AdamElement{.w = 1});
    std::array<Hyper, 2> hyper{rank.optimizer.hyper(GroupId{0}), rank.optimizer.hyper(GroupId{1})};
    EXPECT_EQ(hyper[0], (Hyper{.lr = 1e-2, .weight_decay = 0.1}));
    for (int step = 0; step < 5; ++step) {
      if (step == 1) {  // of A only: a new rate
        hyper[0].lr = 3e-2;
      } else if (step == 2) {  // of B only: decay
        hyper[1].weight_decay = 0.5;
      } else if (step == 3) {
        hyper[0].beta1 = 0.5;
        hyper[1].eps = 1e-2;
      }
      rank.optimizer.set(GroupId{0}, hyper[0]);
      rank.optimizer.set(GroupId{1}, hyper[1]);
      train_step(rank.optimizer, [](ParameterId, std::size_t) { return 1.0F; });
      for (std::size_t p = 0; p < 4; ++p) {
        right[p].step(1, hyper.at(p % 2));
      }
      expect_element_by_element(rank, right, initial);
      if (step == 0) {
        EXPECT_NEAR(right[0].w, 1 * (1 - 1e-3) - 1e-2, 1e-8);
        EXPECT_NEAR(right[1].w, 1 - 1e-3, 1e-8);
      }
    }
  });
}

class B019 : public StagesAndWorlds {};
INSTANTIATE_TEST_SUITE_P(All, B019,
                         ::testing::Combine(every_stage(), ::testing::Values(1, 2, 3, 4, 8)),
                         case_name);

TEST_P(B019, GroupsSmallerThanTheWorldTrainAlone) {
  const std::size_t below = world() > 1 ? static_cast<std::size_t>(world()) - 1 : 0;
  for (const std::vector<std::size_t>& counts :
       {std::vector<std::size_t>{1}, {2}, {below}, {1, 2, below, 5000}}) {
    ModelSpec model;
    std::size_t elements = 0;
    for (std::size_t i = 0; i < counts.size(); ++i) {
      // A group each; of one class or of two, so that some ranks own nothing of a whole array.
      const GroupId group = model.add_group(
          "g." + std::to_string(i), {.precision = i % 2 == 0 ? kFloat32Only : kBf16WithMaster});
      model.add(model.add_unit("u." + std::to_string(i)), "p", {counts[i]}, group);
      elements += counts[i];
    }
    Options clipping = options();
    clipping.clip_norm = 1e-3;
    run_each(world(), model, clipping, [&](Rank& rank) {
      const StepResult result =
          train_step(rank.optimizer, [](ParameterId, std::size_t) { return -1.0F; });
      EXPECT_TRUE(result.applied);
      EXPECT_DOUBLE_EQ(result.grad_norm, std::sqrt(static_cast<double>(elements)));
      const Tensors master = whole(rank, Values::kMaster), m = whole_state(rank, "exp_avg");
      for (std::size_t p = 0; p < counts.size(); ++p) {
        std::vector<float> initial(counts[p]);
        initial_values(parameter(p), 0, initial);
        for (std::size_t i = 0; i < counts[p]; ++i) {
          AdamElement right{.w = static_cast<double>(initial[i])};
          right.step(-1e-3 / (result.grad_norm + 1e-6), Hyper{});
          ASSERT_NEAR(master[p][i], right.w, 1e-7);
          ASSERT_NEAR(m[p][i] / right.m, 1, 1e-6);
        }
      }
    });
  }
}

TEST_P(B019, ARankThatOwnsNothingShowsNothing) {
  run_each(world(), plain_model({1}), options(), [](Rank& rank) {
    train_step(rank.optimizer, [](ParameterId, std::size_t) { return 1.0F; });
    std::size_t shown = 0;
    const Visit count = [&](ParameterId, std::uint64_t, std::span<const float> values) {
      shown += values.size();
    };
    rank.optimizer.visit_own(Values::kParameters, count);
    rank.optimizer.visit_own(Values::kMaster, count);
    rank.optimizer.visit_own(Values::kGradients, count);
    rank.optimizer.visit_own_state("exp_avg", count);
    EXPECT_EQ(shown, rank.rank() == 0 ? 4U : 0U);
    EXPECT_EQ(rank.optimizer.step_count(parameter(0)), 1);
  });
}

class B020 : public StagesAndWorlds {
 protected:
  static constexpr std::size_t kUnits = 6;
  static ModelSpec even_model(Precision precision) {
    return plain_model(std::vector<std::size_t>(kUnits, kPerUnit), {}, precision);
  }
  static constexpr std::size_t kPerUnit = 24 * kGranule;  // divides by every W here: no padding
  static constexpr std::size_t kElements = kUnits * kPerUnit;

  struct Bytes {
    std::uint64_t persistent = 0, peak = 0, padding = 0;
  };
  // As the ledger of the first rank saw them over three steps of two micro-batches.
  static Bytes measure(const ModelSpec& model, const Options& options) {
    Bytes out;
    run_each(world(), model, options, [&](Rank& rank) {
      for (int step = 0; step < 3; ++step) {
        (void)read_all(rank.optimizer);
        run_micro_batch(
            rank.optimizer, [](ParameterId, std::size_t) { return 1.0F; }, Last::kNo);
        train_step(rank.optimizer, [](ParameterId, std::size_t) { return 1.0F; });
      }
      const MemoryUsage usage = rank.device->usage();
      EXPECT_EQ(usage.peak_bytes, rank.optimizer.plan().peak_bytes(rank.rank()));
      if (rank.rank() == 0) {
        out.peak = usage.peak_bytes;
        out.padding = usage.of(Category::kPadding);
        for (const Category c : {Category::kParameters, Category::kGradients, Category::kMaster,
                                 Category::kStates, Category::kPadding}) {
          out.persistent += usage.of(c);
        }
      }
    });
    return out;
  }
  // Bytes an element of parameters, gradients (accumulated in fp32), masters and states.
  static std::uint64_t formula(Precision precision) {
    const std::uint64_t w = static_cast<std::uint64_t>(world());
    const bool low = precision == kBf16WithMaster;
    const std::uint64_t p = (low ? 2 : 4) * kElements, g = 4 * kElements,
                        s = (low ? 12 : 8) * kElements;
    switch (stage()) {
      case Stage::kReplicated:
        return p + g + s;
      case Stage::kStates:
        return p + g + s / w;
      case Stage::kGradients:
        return p + g / w + s / w;
      default:
        return (p + g + s) / w;
    }
  }
  // Chunk, parameter and group rows, control message and scalars: small and fixed.
  static std::uint64_t tables() { return 8192; }
};
INSTANTIATE_TEST_SUITE_P(All, B020, every_case(), case_name);

TEST_P(B020, PersistentBytesAreTheFormulas) {
  for (const Precision precision : {kFloat32Only, kBf16WithMaster}) {
    const Bytes found = measure(even_model(precision), options());
    EXPECT_EQ(found.padding, 0U);
    EXPECT_EQ(found.persistent, formula(precision));
  }
}

TEST_P(B020, ThePeakAddsOnlyBucketsScratchAndLiveUnits) {
  for (const Precision precision : {kFloat32Only, kBf16WithMaster}) {
    const std::uint64_t gradient = bytes_of(precision.gradient),
                        weight = bytes_of(precision.parameter);
    Options choice = options();
    choice.bucket_bytes = 2 * kPerUnit * gradient;
    const Bytes found = measure(even_model(precision), choice);
    const std::uint64_t buckets = 2 * choice.bucket_bytes;
    const std::uint64_t live = stage() == Stage::kParameters ? 2 * kPerUnit * weight : 0;
    // One fp32 shard of a bucket for the second micro-batch.
    const std::uint64_t scratch = stage() >= Stage::kGradients ? 2 * kPerUnit * 4 : 0;
    EXPECT_LE(found.peak, found.persistent + buckets + live + scratch + tables());
    EXPECT_GE(found.peak, found.persistent + buckets + live);
  }
}

TEST_P(B020, OddSizesCostLessThanAGranuleAndAWorldsGranulesOfPadding) {
  const std::vector<std::size_t> counts{1, 5, 257, 1000, 7919};
  const ModelSpec model = plain_model(counts, {}, kBf16WithMaster);
  const Bytes found = measure(model, options());
  // A unit here is a segment of one parameter: 18 bytes an element over all arrays, at most.
  const std::uint64_t most =
      counts.size() * 18 * (kGranule + kGranule * static_cast<std::uint64_t>(world()));
  EXPECT_LT(found.padding, most);
}

TEST_P(B020, AHigherStageNeverPeaksHigherThanItsBuffersExplain) {
  if (stage() == Stage::kReplicated) {
    return;  // compared by the others
  }
  Options lower = options();
  lower.stage = static_cast<Stage>(static_cast<int>(stage()) - 1);
  const Bytes above = measure(even_model(kBf16WithMaster), options());
  const Bytes below = measure(even_model(kBf16WithMaster), lower);
  EXPECT_LE(above.persistent, below.persistent);
  const std::uint64_t live = 2 * kPerUnit * sizeof(bf16), scratch = kElements * 4;
  EXPECT_LE(above.peak, below.peak + live + scratch);
  if (world() > 1) {
    EXPECT_LT(above.persistent, below.persistent);
  }
}

}  // namespace
}  // namespace zero::testing
