// Parameters of every odd kind, at every stage and world.
#include <atomic>
#include <cmath>

#include <gtest/gtest.h>

#include "tests/support/ranks.h"

namespace zero::testing {
namespace {

class ParameterKinds : public StagesAndWorlds {
 protected:
  static Element one() {
    return [](ParameterId, std::size_t) { return 1.0F; };
  }
  // Bytes on rank 0 by category, after a step.
  static MemoryUsage usage_of(const ModelSpec& model) {
    MemoryUsage out;
    run_each(world(), model, options(), [&](Rank& rank) {
      train_step(rank.optimizer, one());
      if (rank.rank() == 0) {
        out = rank.device->usage();
      }
    });
    return out;
  }
};
INSTANTIATE_TEST_SUITE_P(All, ParameterKinds,
                         ::testing::Combine(every_stage(), ::testing::Values(1, 2, 3, 4, 7, 8)),
                         case_name);

// Wide frozen bases between narrow adapters, as LoRA has them, of a size without padding.
ModelSpec adapters(Train bases) {
  ModelSpec model;
  const GroupId base = model.add_group("base", {.precision = kBf16WithMaster, .train = bases});
  const GroupId adapter = model.add_group("adapter");
  for (const char* name : {"h.0", "h.1"}) {
    const UnitId u = model.add_unit(name);
    model.add(u, "q.base", {168 * kGranule}, base);  // divides by 1, 2, 3, 4, 7 and 8
    model.add(u, "q.a", {168 * kGranule}, adapter);
    model.add(u, "v.base", {336 * kGranule}, base);
    model.add(u, "v.b", {5}, adapter);
  }
  return model;
}

TEST_P(ParameterKinds, FrozenOnesCostBytesOfParametersOnly) {
  const std::uint64_t w = static_cast<std::uint64_t>(world());
  ModelSpec without;  // the same adapters alone
  {
    const GroupId adapter = without.add_group("adapter");
    for (const char* name : {"h.0", "h.1"}) {
      const UnitId u = without.add_unit(name);
      without.add(u, "q.a", {168 * kGranule}, adapter);
      without.add(u, "v.b", {5}, adapter);
    }
  }
  const MemoryUsage with_bases = usage_of(adapters(Train::kFrozen)), alone = usage_of(without);
  const std::uint64_t bases = 2 * 504 * kGranule * sizeof(bf16);
  EXPECT_EQ(with_bases.of(Category::kParameters) - alone.of(Category::kParameters),
            stage() == Stage::kParameters ? bases / w : bases);
  for (const Category same : {Category::kGradients, Category::kMaster, Category::kStates,
                              Category::kPadding, Category::kBuckets}) {
    EXPECT_EQ(with_bases.of(same), alone.of(same)) << name_of(same);
  }
  EXPECT_EQ(with_bases.of(Category::kMaster), 0U);
}

TEST_P(ParameterKinds, FrozenOnesKeepEveryBitAndTheRestTrains) {
  run_each(world(), adapters(Train::kFrozen), options(), [](Rank& rank) {
    const Tensors before = read_all(rank.optimizer);
    for (int step = 0; step < 3; ++step) {
      EXPECT_DOUBLE_EQ(train_step(rank.optimizer, one()).grad_norm,
                       std::sqrt(2.0 * (168.0 * kGranule + 5)));
    }
    const Tensors after = read_all(rank.optimizer);
    for (std::size_t p = 0; p < before.size(); ++p) {
      const bool frozen = !is_trained(rank.optimizer.plan().model(), parameter(p));
      EXPECT_EQ(before[p] == after[p], frozen) << p;
      EXPECT_EQ(rank.optimizer.step_count(parameter(p)), frozen ? 0 : 3);
    }
  });
}

TEST_P(ParameterKinds, OfNoElementsOneElementAndFewerThanRanksTrain) {
  const auto w = static_cast<std::size_t>(world());
  ModelSpec model;
  const GroupId all = model.add_group("all", {.hyper = {.lr = 1e-2}});
  const UnitId u = model.add_unit("u");
  model.add(u, "none", {0, 3}, all);
  model.add(u, "scalar", {}, all);
  model.add(u, "few", {w > 1 ? w - 1 : 1}, all);
  model.add(u, "as many", {w}, all);
  model.add(u, "prime", {65537}, all);
  model.add(model.add_unit("only nothing"), "none", {0}, all);
  model.add(model.add_unit("only a scalar"), "scalar", {}, all);
  run_each(world(), model, options(), [&](Rank& rank) {
    const Tensors before = read_all(rank.optimizer);
    double elements = 0;
    for (const std::vector<float>& values : before) {
      elements += static_cast<double>(values.size());
    }
    const StepResult result = train_step(rank.optimizer, one());
    EXPECT_DOUBLE_EQ(result.grad_norm, std::sqrt(elements));
    const Tensors after = read_all(rank.optimizer);
    for (std::size_t p = 0; p < before.size(); ++p) {
      ASSERT_EQ(after[p].size(), model.parameters()[p].count);
      for (std::size_t i = 0; i < after[p].size(); ++i) {
        ASSERT_NEAR(after[p][i], before[p][i] - 1e-2F, 1e-6F) << p << "[" << i << "]";
      }
    }
  });
}

TEST_P(ParameterKinds, OfSeveralDtypesAndRulesInOneUnitTrain) {
  ModelSpec model;
  const Hyper hyper{.lr = 1e-2, .weight_decay = 0.1};
  const GroupId full = model.add_group("fp32", {.hyper = hyper});
  const GroupId low = model.add_group("bf16", {.hyper = hyper, .precision = kBf16WithMaster});
  const GroupId wide = model.add_group(
      "bf16 with fp32 gradients",
      {.hyper = hyper, .precision = {DType::kBfloat16, DType::kFloat32, Master::kFloat32}});
  const GroupId l2 = model.add_group("l2", {.hyper = {.lr = 1e-2}, .rule = adam()});
  model.add_group("empty");
  model.add_group("empty and frozen", {.train = Train::kFrozen});
  const UnitId u = model.add_unit("mixed");
  for (const GroupId g : {full, low, wide, l2, low, full}) {
    model.add(u, "p." + std::to_string(model.parameters().size()), {300}, g);
  }
  run_each(world(), model, options(), [](Rank& rank) {
    std::vector<AdamElement> right;
    for (const std::vector<float>& values : whole(rank, Values::kMaster)) {
      right.push_back({.w = static_cast<double>(values[7])});
    }
    for (int step = 0; step < 4; ++step) {
      const float g = 0.5F * static_cast<float>(1 + step);
      train_step(rank.optimizer, [&](ParameterId, std::size_t) { return g; });
      for (std::size_t p = 0; p < right.size(); ++p) {
        right[p].step(static_cast<double>(g),
                      rank.optimizer.hyper(rank.optimizer.plan().model().parameters()[p].group));
      }
    }
    const Tensors master = whole(rank, Values::kMaster), seen = read_all(rank.optimizer);
    for (std::size_t p = 0; p < right.size(); ++p) {
      EXPECT_NEAR(master[p][7], right[p].w, 1e-6) << p;
      const Precision& precision = group_of(rank.optimizer.plan().model(), parameter(p)).precision;
      const bool rounded = precision.parameter == DType::kBfloat16;
      EXPECT_EQ(seen[p][7], rounded ? to_float(to_bf16(master[p][7])) : master[p][7]) << p;
    }
  });
}

TEST_P(ParameterKinds, EmptyGroupsAndUnitsChangeNothing) {
  const auto hash = [&](bool with_empty_ones) {
    ModelSpec model;
    if (with_empty_ones) {
      model.add_group("empty first");
      model.add_unit("empty first");
      model.add_unit("empty and tied", GradientLife::kUntilReady);
    }
    const GroupId all = model.add_group("all");
    const UnitId u = model.add_unit("u");
    model.add(u, "w", {300}, all);
    if (with_empty_ones) {
      model.add_unit("empty last");
      model.add_group("empty last", {.precision = kBf16WithMaster});
    }
    std::atomic<std::uint64_t> out = 0;
    run_each(world(), model, options(), [&](Rank& rank) {
      for (std::size_t v = 0; v < model.units().size(); ++v) {
        const ParameterLease lease = rank.optimizer.parameters(unit(v), kHost);
      }
      for (int step = 0; step < 2; ++step) {
        train_step(rank.optimizer, one());
      }
      out = rank.optimizer.state_hash();
    });
    return out.load();
  };
  EXPECT_EQ(hash(true), hash(false));
}

TEST_P(ParameterKinds, AModelWithNothingToTrainStepsAndKeepsEveryBit) {
  ModelSpec model;
  const GroupId frozen = model.add_group("frozen", {.train = Train::kFrozen});
  model.add(model.add_unit("a"), "w", {300}, frozen);
  model.add(model.add_unit("b"), "w", {5}, frozen);
  run_each(world(), model, options(), [](Rank& rank) {
    const Tensors before = read_all(rank.optimizer);
    for (int step = 0; step < 3; ++step) {
      const MicroBatch micro = rank.optimizer.begin_micro_batch({.last = Last::kYes});
      EXPECT_EQ(read_all(rank.optimizer), before);
      const StepResult result = rank.optimizer.step().get();
      EXPECT_TRUE(result.applied);
      EXPECT_EQ(result.grad_norm, 0.0);
    }
    EXPECT_EQ(read_all(rank.optimizer), before);
    EXPECT_EQ(rank.device->usage().of(Category::kStates), 0U);
  });
}

// Alternating heads, and a branch of which each rank takes another part.
TEST_P(ParameterKinds, UnusedOnesAreUntouchedWhenNoRankUsesThem) {
  run_each(world(), plain_model({300, 300, 300}, {.lr = 1e-2, .weight_decay = 0.1}), options(),
           [](Rank& rank) {
             for (int step = 0; step < 4; ++step) {
               const Snapshot before = snapshot(rank);
               run_micro_batch(rank.optimizer, one(), Last::kYes, [&](ParameterId p) {
                 return index(p) == 0 || (index(p) == 1 && step % 2 == 0) ||
                        (index(p) == 2 && rank.rank() == step);
               });
               rank.optimizer.step();
               const Snapshot after = snapshot(rank);
               EXPECT_NE(after.parameters[0], before.parameters[0]);
               EXPECT_EQ(after.parameters[1] != before.parameters[1], step % 2 == 0);
               EXPECT_EQ(after.exp_avg[1] != before.exp_avg[1], step % 2 == 0);
               EXPECT_EQ(after.parameters[2] != before.parameters[2], step < rank.world());
               EXPECT_EQ(after.exp_avg_sq[2] != before.exp_avg_sq[2], step < rank.world());
             }
             EXPECT_EQ(rank.optimizer.step_count(parameter(0)), 4);
             EXPECT_EQ(rank.optimizer.step_count(parameter(1)), 2);
             EXPECT_EQ(rank.optimizer.step_count(parameter(2)), std::min(4, rank.world()));
           });
}

// Used in one of two micro-batches: a zero in the other, and one update.
TEST_P(ParameterKinds, UnusedInOneMicroBatchCountsAsZeroThere) {
  run_each(world(), plain_model({300, 5}), options(), [](Rank& rank) {
    run_micro_batch(rank.optimizer, one(), Last::kNo, [](ParameterId p) { return index(p) == 0; });
    run_micro_batch(rank.optimizer, one());
    rank.optimizer.step();
    EXPECT_EQ(whole(rank, Values::kGradients),
              (Tensors{std::vector<float>(300, 1.0F), std::vector<float>(5, 0.5F)}));
    EXPECT_EQ(rank.optimizer.step_count(parameter(1)), 1);
  });
}

TEST_P(ParameterKinds, NotCountedInTheNormAreClippedAllTheSame) {
  ModelSpec model;
  const GroupId all = model.add_group("all");
  const UnitId u = model.add_unit("u");
  model.add(u, "counted", {300}, all);
  model.add(u, "replica", {300}, all, CountInNorm::kNo);
  Options clipping = options();
  clipping.clip_norm = 1.0;
  run_each(world(), model, clipping, [](Rank& rank) {
    EXPECT_DOUBLE_EQ(train_step(rank.optimizer, one()).grad_norm, std::sqrt(300.0));
    const Tensors m = whole_state(rank, "exp_avg");
    EXPECT_EQ(m[0], m[1]);
    EXPECT_NEAR(m[1][0], 0.1 / (std::sqrt(300.0) + 1e-6), 1e-8);
  });
}

}  // namespace
}  // namespace zero::testing
