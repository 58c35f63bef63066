// Wrong numbers that users of other systems reported: norms, padding, skipping, counters, masters.
#include <array>
#include <cmath>
#include <limits>
#include <mutex>

#include <gtest/gtest.h>

#include "tests/support/hooked_backend.h"
#include "tests/support/ranks.h"

namespace zero::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// A rank on a device whose fresh memory is NaN, and whose padding is NaN before each step.
struct PoisonedRank {
  PoisonedRank(const ModelSpec& model, const Options& options, Communicator& communicator_in)
      : communicator(communicator_in), ledger(make_cpu_backend()), device(*ledger) {
    device.before_measure = [this](const UpdateArguments& a) {
      poisoned += poison_uncovered(device, a);
    };
    optimizer.emplace(make_plan(model, options, {.shard_ranks = communicator.world()}), device,
                      Communicators{communicator});
    optimizer->initialize(initial_values);
  }

  Communicator& communicator;
  std::unique_ptr<Ledger> ledger;
  HookedBackend device;
  std::size_t poisoned = 0;  // written by the engine stream; read after a get()
  std::optional<Optimizer> optimizer;
};

class B001 : public StagesAndWorlds {};
INSTANTIATE_TEST_SUITE_P(All, B001, every_case(), case_name);

// Four parameters of one element each: the shards of one padded unit belong to different ranks
// only where a parameter's granule begins a new one.
ModelSpec four_elements() {
  ModelSpec model;
  const GroupId group = model.add_group("all", {.hyper = {.lr = 1e-2}});
  const UnitId only = model.add_unit("u");
  for (const char* name : {"p.0", "p.1", "p.2", "p.3"}) {
    model.add(only, name, {1}, group);
  }
  return model;
}

// Even ranks give [6,0,2,-2], odd ones [0,8,-2,2]; with the last of an odd world giving the mean.
float uneven_gradient(int rank, int world, std::size_t p) {
  constexpr std::array<float, 4> kEven{6, 0, 2, -2}, kOdd{0, 8, -2, 2}, kMean{3, 4, 0, 0};
  return (world % 2 == 1 && rank == world - 1 ? kMean : rank % 2 == 0 ? kEven : kOdd).at(p);
}

TEST_P(B001, EveryRankClipsByTheOneNorm) {
  run_ranks(world(), [](Communicator& communicator) {
    Options clipping = options();
    clipping.clip_norm = 1.0;
    PoisonedRank rank(four_elements(), clipping, communicator);
    const Element gradient = [&](ParameterId p, std::size_t) {
      return uneven_gradient(communicator.rank(), communicator.world(), index(p));
    };
    const StepResult result = train_step(*rank.optimizer, gradient);
    EXPECT_EQ(result.grad_norm, 5.0);
    EXPECT_GT(rank.poisoned, 0U);
    const Tensors m = gather_owned(
        rank.optimizer->plan().model(), communicator,
        [&](const Visit& visit) { rank.optimizer->visit_own_state("exp_avg", visit); });
    // m = (1 - beta1) * factor * g: shows the factor itself, which Adam's step would hide.
    const float factor = static_cast<float>(1.0 / (5.0 + 1e-6));
    EXPECT_EQ(m[0][0], static_cast<float>(1 - 0.9) * (3.0F * factor));
    EXPECT_EQ(m[1][0], static_cast<float>(1 - 0.9) * (4.0F * factor));
    EXPECT_EQ(m[2][0], 0.0F);
    EXPECT_EQ(m[3][0], 0.0F);
  });
}

TEST_P(B001, ANormBelowTheLimitLeavesEveryBit) {
  std::array<std::uint64_t, 2> hashes{};
  for (std::size_t i = 0; i < 2; ++i) {
    Options choice = options();
    choice.clip_norm = i == 0 ? std::nullopt : std::optional(5.0);
    run_each(world(), four_elements(), choice, [&](Rank& rank) {
      const StepResult result = train_step(rank.optimizer, [&](ParameterId p, std::size_t) {
        return uneven_gradient(rank.rank(), rank.world(), index(p));
      });
      EXPECT_EQ(result.grad_norm, 5.0);
      const std::uint64_t hash = rank.optimizer.state_hash();
      if (rank.rank() == 0) {
        hashes.at(i) = hash;
      }
    });
  }
  EXPECT_EQ(hashes[0], hashes[1]);
}

class B002 : public StagesAndWorlds {};
INSTANTIATE_TEST_SUITE_P(All, B002,
                         ::testing::Combine(every_stage(), ::testing::Values(1, 2, 3, 4, 8)),
                         case_name);

TEST_P(B002, PaddingIsInNoStatisticAndNoWeight) {
  for (const std::size_t count : {1U, 5U, 19U, 57U}) {
    const ModelSpec model = plain_model({count, 1});
    run_ranks(world(), [&](Communicator& communicator) {
      PoisonedRank rank(model, options(), communicator);
      for (int step = 0; step < 3; ++step) {
        const StepResult result =
            train_step(*rank.optimizer, [](ParameterId, std::size_t) { return 1.0F; });
        ASSERT_TRUE(result.applied);
        EXPECT_DOUBLE_EQ(result.grad_norm, std::sqrt(static_cast<double>(count + 1)));
        EXPECT_FALSE(result.first_non_finite.has_value());
      }
      EXPECT_GT(rank.poisoned, 0U);
      for (std::size_t p = 0; p < 2; ++p) {
        const std::vector<float> found = read(*rank.optimizer, parameter(p));
        std::vector<float> initial(found.size());
        initial_values(parameter(p), 0, initial);
        for (std::size_t i = 0; i < found.size(); ++i) {
          ASSERT_NEAR(found[i], initial[i] - 3e-3F, 1e-6F) << count << ", element " << i;
        }
      }
    });
  }
}

TEST_P(B002, PaddedSizesAreMultiplesOfWorldTimesGranule) {
  for (const std::size_t count : {1U, 5U, 19U, 57U, 256U, 257U, 2048U, 2049U}) {
    const Plan plan = make_plan(plain_model({count}), options(), {.shard_ranks = world()});
    const std::uint64_t unit_of_padding = static_cast<std::uint64_t>(world()) * kGranule;
    ASSERT_EQ(plan.segments().size(), 1U);
    EXPECT_EQ(plan.segments()[0].elements,
              (count + unit_of_padding - 1) / unit_of_padding * unit_of_padding);
    std::uint64_t owned = 0;
    for (int r = 0; r < world(); ++r) {
      for (const Extent& e : plan.extents(r, unit(0))) {
        EXPECT_EQ(e.first, owned);
        owned += e.count;
      }
    }
    EXPECT_EQ(owned, count);
  }
}

class B003 : public StagesAndWorlds {};
INSTANTIATE_TEST_SUITE_P(All, B003, every_case(), case_name);

TEST_P(B003, ANonFiniteGradientChangesNothing) {
  const ModelSpec model = odd_model(kBf16WithMaster);
  run_each(world(), model, options(), [&](Rank& rank) {
    const auto good = [&](std::int64_t step) -> Element {
      return [&rank, step](ParameterId p, std::size_t i) {
        return std::ldexp(static_cast<float>(rank.rank() + 1) * (i % 2 == 0 ? 1.0F : -1.0F),
                          static_cast<int>((index(p) + i + static_cast<std::size_t>(step)) % 4));
      };
    };
    ASSERT_TRUE(train_step(rank.optimizer, good(0)).applied);
    const Snapshot before = snapshot(rank);
    for (const float bad : {kInfinity, -kInfinity, kNan}) {
      const Element gradient = [&](ParameterId p, std::size_t i) {
        const bool here = rank.rank() == rank.world() - 1 && index(p) == 1 && i == 100;
        return here ? bad : good(1)(p, i);
      };
      const StepResult result = train_step(rank.optimizer, gradient);
      EXPECT_FALSE(result.applied);
      EXPECT_TRUE(std::isnan(result.grad_norm));
      EXPECT_EQ(result.first_non_finite, parameter(1));
      EXPECT_EQ(snapshot(rank), before);
    }
  });
}

TEST_P(B003, TheNextCleanStepIsAsIfTheBadOneNeverWas) {
  const ModelSpec model = odd_model(kBf16WithMaster);
  const auto after = [&](bool with_bad_step) {
    Snapshot out;
    run_each(world(), model, options(), [&](Rank& rank) {
      const Element good = [&](ParameterId p, std::size_t i) {
        return static_cast<float>((index(p) + i) % 7) - static_cast<float>(rank.rank());
      };
      train_step(rank.optimizer, good);
      if (with_bad_step) {
        const Element bad = [&](ParameterId p, std::size_t i) {
          return rank.rank() == 0 && index(p) == 0 && i == 0 ? kNan : good(p, i);
        };
        EXPECT_FALSE(train_step(rank.optimizer, bad).applied);
      }
      EXPECT_TRUE(train_step(rank.optimizer, good).applied);
      const Snapshot mine = snapshot(rank);
      if (rank.rank() == 0) {
        out = mine;
      }
    });
    return out;
  };
  EXPECT_EQ(after(true), after(false));
}

class B005 : public StagesAndWorlds {};
INSTANTIATE_TEST_SUITE_P(All, B005, every_case(), case_name);

// Sets the device's counter, as loading an old state would, and takes one step with constant
// gradients and warm moments: the update is lr * m^ / sqrt(v^) with the true t.
TEST_P(B005, TheCounterIsExactAtEverySize) {
  const Hyper hyper{.lr = 1e-2, .beta2 = 0.9999999};
  const ModelSpec model = plain_model({5}, hyper, kBf16WithMaster);
  run_ranks(world(), [&](Communicator& communicator) {
    const auto ledger = make_cpu_backend();
    HookedBackend device(*ledger);
    std::int64_t start = 0;
    device.before_prepare = [&](const UpdateArguments& a) { a.rows[0].step = start; };
    Optimizer optimizer(make_plan(model, options(), {.shard_ranks = communicator.world()}), device,
                        {communicator});
    for (const std::int64_t t : {255, 256, 257, 2047, 2048, 2049, 10'000'000}) {
      optimizer.initialize([](ParameterId, std::uint64_t, std::span<float> out) {
        std::fill(out.begin(), out.end(), 1.0F);
      });
      start = t - 1;
      train_step(optimizer, [](ParameterId, std::size_t) { return 1.0F; });
      EXPECT_EQ(optimizer.step_count(parameter(0)), t);
      AdamElement right{.w = 1, .t = t - 1};
      right.step(1, hyper);
      optimizer.visit_own(Values::kMaster,
                          [&](ParameterId, std::uint64_t, std::span<const float> values) {
                            for (const float x : values) {
                              ASSERT_NEAR((1 - x) / (1 - right.w), 1, 1e-4) << "t = " << t;
                            }
                          });
    }
  });
}

TEST_P(B005, TheCounterPasses256ByStepping) {
  run_each(world(), plain_model({3}, {.lr = 1e-3}, kBf16WithMaster), options(), [](Rank& rank) {
    for (int step = 0; step < 260; ++step) {
      train_step(rank.optimizer, [](ParameterId, std::size_t) { return 1.0F; });
    }
    EXPECT_EQ(rank.optimizer.step_count(parameter(0)), 260);
  });
}

class B006 : public StagesAndWorlds {};
INSTANTIATE_TEST_SUITE_P(All, B006, every_case(), case_name);

TEST_P(B006, SmallUpdatesMoveABf16WeightThroughItsMaster) {
  const ModelSpec model = plain_model({300}, {.lr = 6e-4}, kBf16WithMaster);
  run_ranks(world(), [&](Communicator& communicator) {
    Rank rank(model, options(), communicator, [](ParameterId, std::uint64_t, std::span<float> out) {
      std::fill(out.begin(), out.end(), 1.0F);
    });
    for (int step = 0; step < 100; ++step) {
      train_step(rank.optimizer, [](ParameterId, std::size_t) { return 1.0F; });
    }
    // Each step subtracts lr to 1e-8 of it; 100 fp32 subtractions near 1 round by 6e-8 each.
    const Tensors masters = whole(rank, Values::kMaster);
    for (const float master : masters[0]) {
      ASSERT_NEAR(master, 0.94F, 1e-5F);
    }
    for (const float weight : read(rank.optimizer, parameter(0))) {
      ASSERT_EQ(weight, 0.94140625F);
    }
  });
}

TEST(B006, TrainingBf16WithoutAMasterIsRefusedByName) {
  ModelSpec model;
  try {
    model.add_group("low", {.precision = {DType::kBfloat16, DType::kBfloat16, Master::kNone}});
    FAIL() << "a bf16 group without masters was accepted";
  } catch (const UsageError& e) {
    EXPECT_NE(std::string(e.what()).find("\"low\""), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find("kBf16WithMaster"), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace zero::testing
