// Reading and writing values: own extents, whole models, states, and the digest.
#include <algorithm>
#include <atomic>
#include <map>
#include <set>
#include <vector>

#include <gtest/gtest.h>

#include "tests/support/ranks.h"

namespace zero::testing {
namespace {

float one(ParameterId, std::size_t) {
  return 1.0F;
}

class ValuesOf : public StagesAndWorlds {
 protected:
  // What `visit_all` shows to the root; checks that it shows each element once, in order.
  static Tensors export_all(Rank& rank, Values values, int root) {
    const ModelSpec& model = rank.optimizer.plan().model();
    Tensors out(model.parameters().size());
    std::map<std::pair<std::size_t, std::uint64_t>, std::vector<float>> pieces;
    rank.optimizer.visit_all(
        values,
        [&](ParameterId p, std::uint64_t first, std::span<const float> v) {
          EXPECT_EQ(rank.rank(), root);
          EXPECT_TRUE(pieces.try_emplace({index(p), first}, v.begin(), v.end()).second);
        },
        root);
    for (const auto& [at, piece] : pieces) {
      EXPECT_EQ(out[at.first].size(), at.second) << "a hole or an overlap";
      out[at.first].insert(out[at.first].end(), piece.begin(), piece.end());
    }
    return out;
  }
  static void train_a_little(Rank& rank) {
    for (int step = 0; step < 2; ++step) {
      train_step(rank.optimizer, [&](ParameterId p, std::size_t i) {
        return static_cast<float>((index(p) + i) % 5) - static_cast<float>(rank.rank());
      });
    }
  }
};
INSTANTIATE_TEST_SUITE_P(All, ValuesOf, every_case(), case_name);

TEST_P(ValuesOf, TheWholeModelGoToTheRootAndToNobodyElse) {
  for (const std::size_t bucket_bytes : {1U, 1U << 20U}) {
    Options choice = options();
    choice.bucket_bytes = bucket_bytes;
    run_each(world(), odd_model(kBf16WithMaster), choice, [](Rank& rank) {
      train_a_little(rank);
      for (const Values values : {Values::kParameters, Values::kMaster, Values::kGradients}) {
        const Tensors right = whole(rank, values);
        for (int root = 0; root < rank.world(); ++root) {
          const Tensors found = export_all(rank, values, root);
          for (std::size_t p = 0; p < right.size(); ++p) {
            const bool shown =
                rank.rank() == root && (values != Values::kGradients ||
                                        is_trained(rank.optimizer.plan().model(), parameter(p)));
            EXPECT_EQ(found[p], shown ? right[p] : std::vector<float>{}) << p;
          }
        }
      }
    });
  }
}

TEST_P(ValuesOf, ParametersAreTheMastersRounded) {
  run_each(world(), odd_model(kBf16WithMaster), options(), [](Rank& rank) {
    train_a_little(rank);
    const ModelSpec& model = rank.optimizer.plan().model();
    const Tensors master = whole(rank, Values::kMaster);
    const Tensors seen = read_all(rank.optimizer), copies = whole(rank, Values::kParameters);
    EXPECT_EQ(seen, copies);
    std::size_t rounded = 0;
    for (std::size_t p = 0; p < master.size(); ++p) {
      for (std::size_t i = 0; i < master[p].size(); ++i) {
        const bool low = group_of(model, parameter(p)).precision.parameter == DType::kBfloat16;
        ASSERT_EQ(seen[p][i], low ? to_float(to_bf16(master[p][i])) : master[p][i]);
        rounded += seen[p][i] != master[p][i] ? 1U : 0U;
      }
    }
    EXPECT_GT(rounded, 0U);
  });
}

TEST_P(ValuesOf, InitializeAreAskedForOwnExtentsOnly) {
  std::atomic<std::uint64_t> asked = 0;
  const ModelSpec model = odd_model(kFloat32Only);
  run_ranks(world(), [&](Communicator& communicator) {
    const auto device = make_cpu_backend();
    Optimizer optimizer(make_plan(model, options(), {.shard_ranks = communicator.world()}), *device,
                        {communicator});
    std::vector<Extent> found;
    optimizer.initialize([&](ParameterId p, std::uint64_t first, std::span<float> out) {
      found.push_back({.parameter = p, .first = first, .count = out.size()});
      asked += out.size();
      initial_values(p, first, out);
    });
    std::vector<Extent> right;
    for (std::size_t u = 0; u < model.units().size(); ++u) {
      for (const Extent& e : optimizer.plan().extents(communicator.rank(), unit(u))) {
        right.push_back({.parameter = e.parameter, .first = e.first, .count = e.count});
      }
    }
    EXPECT_EQ(found, right);
  });
  EXPECT_EQ(asked, make_plan(model, options(), {.shard_ranks = world()}).parameter_count());
}

TEST_P(ValuesOf, InitializeAgainStartAllOver) {
  run_each(world(), odd_model(kBf16WithMaster), options(), [](Rank& rank) {
    const Snapshot fresh = snapshot(rank);
    train_a_little(rank);
    const Snapshot trained = snapshot(rank);
    EXPECT_NE(trained, fresh);
    rank.optimizer.initialize(initial_values);
    EXPECT_EQ(snapshot(rank), fresh);
    train_a_little(rank);
    EXPECT_EQ(snapshot(rank), trained);
  });
}

// Masters and copies change, states and counts stay; every replica is refreshed.
TEST_P(ValuesOf, OverwrittenExtentsReachEveryReplica) {
  run_each(world(), odd_model(kBf16WithMaster), options(), [](Rank& rank) {
    train_a_little(rank);
    (void)read_all(rank.optimizer);
    const Snapshot before = snapshot(rank);
    const auto value = [](std::size_t p, std::uint64_t i) {
      return 1.0F + static_cast<float>(1 + p + i % 100) / 1024.0F;  // not exact in bf16
    };
    rank.optimizer.overwrite_own([&](ParameterId p, std::uint64_t first, std::span<float> out) {
      for (std::size_t i = 0; i < out.size(); ++i) {
        out[i] = value(index(p), first + i);
      }
    });
    const Snapshot after = snapshot(rank);
    EXPECT_EQ(after.exp_avg, before.exp_avg);
    EXPECT_EQ(after.exp_avg_sq, before.exp_avg_sq);
    EXPECT_EQ(after.step_counts, before.step_counts);
    EXPECT_NE(after.hash, before.hash);
    const ModelSpec& model = rank.optimizer.plan().model();
    const Tensors master = whole(rank, Values::kMaster), seen = read_all(rank.optimizer);
    for (std::size_t p = 0; p < seen.size(); ++p) {
      const GroupOptions& group = group_of(model, parameter(p));
      const bool low = group.precision.parameter == DType::kBfloat16;
      for (std::size_t i = 0; i < seen[p].size(); ++i) {
        const float right = value(p, i), rounded = low ? to_float(to_bf16(right)) : right;
        ASSERT_EQ(seen[p][i], rounded) << model.parameters()[p].name;
        ASSERT_EQ(master[p][i], group.train == Train::kYes ? right : rounded);
      }
    }
  });
}

// At stage 0 every rank updates its own copy of all masters: they must have been refreshed too.
TEST_P(ValuesOf, OverwrittenExtentsAreWhatTheNextStepUpdates) {
  run_each(world(), plain_model({300, 5}, {.lr = 1e-2}, kBf16WithMaster), options(),
           [](Rank& rank) {
             rank.optimizer.overwrite_own([](ParameterId, std::uint64_t, std::span<float> out) {
               std::fill(out.begin(), out.end(), 0.7F);
             });
             train_step(rank.optimizer, one);
             const Tensors seen = read_all(rank.optimizer);
             for (const std::vector<float>& values : seen) {
               for (const float x : values) {
                 ASSERT_EQ(x, to_float(to_bf16(0.69F)));
               }
             }
           });
}

TEST_P(ValuesOf, GradientsAreDividedAndUnclipped) {
  Options clipping = options();
  clipping.clip_norm = 1e-3;
  run_each(world(), odd_model(kFloat32Only), clipping, [](Rank& rank) {
    run_micro_batch(
        rank.optimizer, [](ParameterId, std::size_t) { return 1.0F; }, Last::kNo);
    run_micro_batch(rank.optimizer, [](ParameterId, std::size_t) { return 2.0F; });
    rank.optimizer.step();
    const Tensors found = whole(rank, Values::kGradients);
    for (std::size_t p = 0; p < found.size(); ++p) {
      const bool trained = is_trained(rank.optimizer.plan().model(), parameter(p));
      EXPECT_EQ(found[p], std::vector<float>(found[p].size(), trained ? 1.5F : 0.0F)) << p;
    }
    EXPECT_EQ(whole(rank, Values::kGradients), found);  // until the next micro-batch begins
    MicroBatch micro = rank.optimizer.begin_micro_batch();
    EXPECT_THROW(rank.optimizer.visit_own(
                     Values::kGradients, [](ParameterId, std::uint64_t, std::span<const float>) {}),
                 UsageError);
    micro.abandon();
    EXPECT_THROW(rank.optimizer.visit_own(
                     Values::kGradients, [](ParameterId, std::uint64_t, std::span<const float>) {}),
                 UsageError);
  });
}

// Between the micro-batches of a step gradients wait in buckets that an export may not touch.
TEST_P(ValuesOf, TheModelMayBeExportedBetweenMicroBatches) {
  std::vector<std::uint64_t> hashes;
  for (const bool exported : {false, true}) {
    run_each(world(), odd_model(kBf16WithMaster), options(), [&](Rank& rank) {
      for (int step = 0; step < 2; ++step) {
        for (const int micro : {0, 1, 2}) {
          run_micro_batch(
              rank.optimizer,
              [&](ParameterId p, std::size_t i) {
                return static_cast<float>((index(p) + i) % 5) - static_cast<float>(micro);
              },
              micro == 2 ? Last::kYes : Last::kNo);
          if (exported) {
            (void)export_all(rank, Values::kMaster, 0);
            (void)export_all(rank, Values::kParameters, rank.world() - 1);
          }
        }
        rank.optimizer.step();
      }
      const std::uint64_t hash = rank.optimizer.state_hash();
      if (rank.rank() == 0) {
        hashes.push_back(hash);
      }
    });
  }
  EXPECT_EQ(hashes[0], hashes[1]);
}

TEST_P(ValuesOf, TheDigestSeeEveryPersistentBit) {
  run_each(world(), odd_model(kBf16WithMaster), options(), [](Rank& rank) {
    train_a_little(rank);
    std::set<std::uint64_t> seen{rank.optimizer.state_hash()};
    const Tensors master = whole(rank, Values::kMaster);
    for (std::size_t p = 0; p < master.size(); ++p) {
      for (const std::size_t i : {std::size_t{0}, master[p].size() / 2, master[p].size() - 1}) {
        if (i >= master[p].size()) {
          continue;
        }
        rank.optimizer.overwrite_own([&](ParameterId q, std::uint64_t first, std::span<float> out) {
          for (std::size_t k = 0; k < out.size(); ++k) {
            out[k] = master[index(q)][first + k];
            const bool here = index(q) == p && first + k == i;
            out[k] = here ? out[k] + 1 : out[k];
          }
        });
        seen.insert(rank.optimizer.state_hash());
      }
    }
    std::size_t changes = 1;
    for (const std::vector<float>& values : master) {
      changes += std::min<std::size_t>(3, values.size());
    }
    EXPECT_EQ(seen.size(), changes);
  });
}

// Layers have parameters of one name: which layer holds which values counts, too.
TEST_P(ValuesOf, TheDigestSeesWhichUnitHasWhichValues) {
  ModelSpec layers;
  const GroupId all = layers.add_group("all");
  for (const char* name : {"h.0", "h.1"}) {
    layers.add(layers.add_unit(name), "w", {300}, all);
  }
  std::set<std::uint64_t> seen;
  for (const std::size_t ones : {0U, 1U}) {
    std::atomic<std::uint64_t> out = 0;
    run_ranks(world(), [&](Communicator& communicator) {
      Rank rank(layers, options(), communicator,
                [&](ParameterId p, std::uint64_t, std::span<float> values) {
                  std::fill(values.begin(), values.end(), index(p) == ones ? 1.0F : 0.0F);
                });
      out = rank.optimizer.state_hash();
    });
    seen.insert(out);
  }
  EXPECT_EQ(seen.size(), 2U);
}

// Names, and where blocks are, count too: two parameters that swap their values are another model.
TEST_P(ValuesOf, TheDigestSeeWhichParameterHasWhichValues) {
  const auto hash = [&](bool swapped, std::size_t shift) {
    std::atomic<std::uint64_t> out = 0;
    run_ranks(world(), [&](Communicator& communicator) {
      const Rank rank(plain_model({1024, 1024}), options(), communicator,
                      [&](ParameterId p, std::uint64_t first, std::span<float> values) {
                        for (std::size_t i = 0; i < values.size(); ++i) {
                          const std::size_t which = swapped ? 1 - index(p) : index(p);
                          const std::size_t at = (first + i + shift) % 1024;
                          values[i] = static_cast<float>(1024 * which + at);
                        }
                      });
      out = rank.optimizer.state_hash();
    });
    return out.load();
  };
  EXPECT_EQ(hash(false, 0), hash(false, 0));
  EXPECT_NE(hash(false, 0), hash(true, 0));
  EXPECT_NE(hash(false, 0), hash(false, 256));  // the same blocks elsewhere
}

TEST(TheDigest, IsTheSameAtEveryStageAndWorld) {
  const Watchdog watchdog(std::chrono::seconds(60));
  std::set<std::uint64_t> seen;
  for (const Stage stage :
       {Stage::kReplicated, Stage::kStates, Stage::kGradients, Stage::kParameters}) {
    for (const int world : {1, 2, 3, 4, 7, 8}) {
      run_each(world, odd_model(kBf16WithMaster), {.stage = stage}, [&](Rank& rank) {
        train_step(rank.optimizer, one);  // a sum of W ones, divided by W
        const std::uint64_t hash = rank.optimizer.state_hash();
        if (rank.rank() == 0) {
          seen.insert(hash);
        }
      });
    }
  }
  EXPECT_EQ(seen.size(), 1U);
}

}  // namespace
}  // namespace zero::testing
