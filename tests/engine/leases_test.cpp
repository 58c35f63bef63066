// Leases of parameters and gradients, in every order that a training loop may need.
#include <array>
#include <atomic>
#include <set>

#include <gtest/gtest.h>

#include "tests/support/ranks.h"

namespace zero::testing {
namespace {

class Leases : public StagesAndWorlds {
 protected:
  static constexpr std::size_t kUnits = 5;

  // A tied embedding, three blocks of two dtypes, and a head.
  static ModelSpec tower() {
    ModelSpec model;
    const GroupId full = model.add_group("full", {.hyper = {.lr = 1e-2, .weight_decay = 0.1}});
    const GroupId low = model.add_group("low", {.precision = kBf16WithMaster});
    model.add(model.add_unit("embed", GradientLife::kUntilReady), "wte", {40, 7}, full);
    for (const char* name : {"h.0", "h.1", "h.2"}) {
      const UnitId block = model.add_unit(name);
      model.add(block, "w", {257, 2}, low);
      model.add(block, "b", {5}, full);
    }
    model.add(model.add_unit("head"), "scale", {}, full);
    return model;
  }

  // Exact in bf16, and every sum of it in fp32.
  static Element gradient(int rank, int micro) {
    return [rank, micro](ParameterId p, std::size_t i) {
      return static_cast<float>((index(p) + 3 * i) % 9) - static_cast<float>(2 * rank + micro);
    };
  }

  // The digest after `body` on every rank.
  static std::uint64_t hash_after(const Options& options, const std::function<void(Rank&)>& body) {
    std::atomic<std::uint64_t> hash = 0;
    run_each(world(), tower(), options, [&](Rank& rank) {
      body(rank);
      hash = rank.optimizer.state_hash();
    });
    return hash;
  }

  // Two steps of two micro-batches, one after the other.
  static void train_plainly(Rank& rank) {
    for (int step = 0; step < 2; ++step) {
      for (const int micro : {0, 1}) {
        run_micro_batch(rank.optimizer, gradient(rank.rank(), micro),
                        micro == 1 ? Last::kYes : Last::kNo);
      }
      EXPECT_TRUE(rank.optimizer.step().get().applied);
    }
  }
};
INSTANTIATE_TEST_SUITE_P(All, Leases, every_case(), case_name);

TEST_P(Leases, OfEvaluationAndSamplingBetweenStepsChangeNoBit) {
  const std::uint64_t plain = hash_after(options(), train_plainly);
  const std::uint64_t with_evaluation = hash_after(options(), [](Rank& rank) {
    const auto visit = [&](std::initializer_list<std::size_t> order) {
      for (const std::size_t u : order) {
        const ParameterLease lease = rank.optimizer.parameters(unit(u), kHost);
      }
    };
    visit({4, 0, 2});
    for (int step = 0; step < 2; ++step) {
      for (const int micro : {0, 1}) {
        visit({0, 1, 2, 3, 4});
        run_micro_batch(rank.optimizer, gradient(rank.rank(), micro),
                        micro == 1 ? Last::kYes : Last::kNo);
        visit({3, 3, 1});  // sampling, in the middle of a step too
      }
      EXPECT_TRUE(rank.optimizer.step().get().applied);
      visit({0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 4, 2, 0});
    }
  });
  EXPECT_EQ(with_evaluation, plain);
}

// Backward of a block leases the units before it again, while the block's gradient is open.
TEST_P(Leases, OfRecomputationDuringBackwardReadTheForwardsParameters) {
  const std::uint64_t plain = hash_after(options(), train_plainly);
  const std::uint64_t recomputed = hash_after(options(), [](Rank& rank) {
    for (int step = 0; step < 2; ++step) {
      const Tensors forward = read_all(rank.optimizer);
      for (const int micro : {0, 1}) {
        MicroBatch batch =
            rank.optimizer.begin_micro_batch({.last = micro == 1 ? Last::kYes : Last::kNo});
        for (std::size_t u = kUnits; u-- > 0;) {
          for (std::size_t p = 0; p < forward.size(); ++p) {
            if (rank.optimizer.plan().model().parameters()[p].unit == unit(u)) {
              const GradientLease open = batch.gradients(unit(u), kHost);
              EXPECT_EQ(read(rank.optimizer, parameter(p)), forward[p]);
              EXPECT_EQ(read(rank.optimizer, parameter(0)), forward[0]);
              write(rank.optimizer, batch, parameter(p), gradient(rank.rank(), micro));
              EXPECT_EQ(read(rank.optimizer, parameter(p)), forward[p]);
            }
          }
          batch.ready(unit(u), kHost);
        }
      }
      EXPECT_TRUE(rank.optimizer.step().get().applied);
      EXPECT_NE(read_all(rank.optimizer), forward);
    }
  });
  EXPECT_EQ(recomputed, plain);
}

// Thirds of each gradient: a kAdd lease, add_gradient from fp32 and from bf16 memory, another
// lease.
TEST_P(Leases, OfAGradientInSeveralPartsAddUp) {
  const std::uint64_t plain = hash_after(options(), train_plainly);
  const std::uint64_t in_parts = hash_after(options(), [](Rank& rank) {
    const ModelSpec& model = rank.optimizer.plan().model();
    const auto add_parts = [&](MicroBatch& micro, std::size_t p, const Element& value) {
      const std::size_t count = model.parameters()[p].count;
      std::array<std::vector<float>, 4> parts;
      for (std::size_t part = 0; part < 4; ++part) {
        parts.at(part).resize(count);
        for (std::size_t i = 0; i < count; ++i) {
          parts.at(part)[i] = i % 4 == part ? value(parameter(p), i) : 0.0F;
        }
      }
      std::vector<bf16> low(count);
      for (std::size_t i = 0; i < count; ++i) {
        low[i] = to_bf16(parts[2][i]);
      }
      const auto lease_part = [&](std::size_t part) {
        return [&, part](ParameterId, std::size_t i) { return parts.at(part)[i]; };
      };
      if (p % 2 == 0) {  // the memory of the first contribution may be whatever it was before
        write(rank.optimizer, micro, parameter(p), lease_part(0), Write::kAdd);
        micro.add_gradient(parameter(p), parts[1].data(), DType::kFloat32, kHost);
      } else {
        micro.add_gradient(parameter(p), parts[1].data(), DType::kFloat32, kHost);
        write(rank.optimizer, micro, parameter(p), lease_part(0), Write::kAdd);
      }
      micro.add_gradient(parameter(p), low.data(), DType::kBfloat16, kHost);
      write(rank.optimizer, micro, parameter(p), lease_part(3), Write::kAdd);
    };
    for (int step = 0; step < 2; ++step) {
      for (const int micro : {0, 1}) {
        MicroBatch batch =
            rank.optimizer.begin_micro_batch({.last = micro == 1 ? Last::kYes : Last::kNo});
        for (std::size_t u = kUnits; u-- > 0;) {
          for (std::size_t p = 0; p < model.parameters().size(); ++p) {
            if (model.parameters()[p].unit == unit(u)) {
              add_parts(batch, p, gradient(rank.rank(), micro));
            }
          }
          batch.ready(unit(u), kHost);
        }
      }
      EXPECT_TRUE(rank.optimizer.step().get().applied);
    }
  });
  EXPECT_EQ(in_parts, plain);
}

TEST_P(Leases, OfAUnitsGradientGiveTheSameMemoryUntilItIsReady) {
  run_each(world(), tower(), options(), [](Rank& rank) {
    MicroBatch micro = rank.optimizer.begin_micro_batch();
    for (const std::size_t u : {0U, 2U}) {
      const ParameterId p = parameter(u == 0 ? 0 : 4);  // the fp32 one of the unit
      std::array<const float*, 3> seen{};
      for (const float*& at : seen) {
        at = micro.gradients(unit(u), kHost).data<float>(p);
        const GradientLease other = micro.gradients(unit(1), kHost);
      }
      EXPECT_EQ(seen[0], seen[1]);
      EXPECT_EQ(seen[0], seen[2]);
      EXPECT_NE(seen[0], nullptr);
    }
    micro.abandon();
  });
}

TEST_P(Leases, OfAnAddedGradientStartAtZeroInEveryMicroBatch) {
  run_each(world(), tower(), options(), [](Rank& rank) {
    for (int step = 0; step < 3; ++step) {
      MicroBatch micro = rank.optimizer.begin_micro_batch({.last = Last::kYes});
      for (std::size_t u = kUnits; u-- > 0;) {
        for (std::size_t p = 0; p < 8; ++p) {
          const ModelSpec::Parameter& what = rank.optimizer.plan().model().parameters()[p];
          if (what.unit == unit(u)) {
            write(
                rank.optimizer, micro, parameter(p), [](ParameterId, std::size_t) { return 7.0F; },
                Write::kAdd);
          }
        }
        micro.ready(unit(u), kHost);
      }
      rank.optimizer.step();
      const Tensors sums = whole(rank, Values::kGradients);
      for (const std::vector<float>& values : sums) {
        EXPECT_EQ(values, std::vector<float>(values.size(), 7.0F));
      }
    }
  });
}

TEST_P(Leases, MayBeMovedAndNested) {
  run_each(world(), tower(), options(), [](Rank& rank) {
    ParameterLease first = rank.optimizer.parameters(unit(1), kHost);
    const bf16* const at = first.data<bf16>(parameter(1));
    {
      const ParameterLease again = rank.optimizer.parameters(unit(1), kHost);
      const ParameterLease moved = std::move(first);
      EXPECT_EQ(again.data<bf16>(parameter(1)), at);
      EXPECT_EQ(moved.data<bf16>(parameter(1)), at);
    }
    // All ended: a step finds no lease open.
    EXPECT_TRUE(train_step(rank.optimizer, gradient(rank.rank(), 0)).applied);
  });
}

// At stages 0 to 2 for the optimizer's life; at stage 3 by unit.
TEST_P(Leases, ShowEachParameterAtOneAddressForEver) {
  run_each(world(), tower(), options(), [](Rank& rank) {
    const ModelSpec& model = rank.optimizer.plan().model();
    const auto address = [&](std::size_t p) -> const void* {
      const ParameterLease lease = rank.optimizer.parameters(model.parameters()[p].unit, kHost);
      return group_of(model, parameter(p)).precision.parameter == DType::kFloat32
                 ? static_cast<const void*>(lease.data<float>(parameter(p)))
                 : static_cast<const void*>(lease.data<bf16>(parameter(p)));
    };
    std::vector<const void*> first;
    for (std::size_t p = 0; p < model.parameters().size(); ++p) {
      first.push_back(address(p));
    }
    const auto expect_the_same = [&] {
      for (const std::size_t p : {7U, 0U, 5U, 1U, 3U, 2U, 6U, 4U}) {
        EXPECT_EQ(address(p), first[p]) << model.parameters()[p].name;
      }
    };
    expect_the_same();
    train_plainly(rank);
    expect_the_same();
    rank.optimizer.overwrite_own(initial_values);
    expect_the_same();
    if (rank.optimizer.plan().options().stage != Stage::kParameters) {
      EXPECT_EQ(std::set<const void*>(first.begin(), first.end()).size(), first.size());
    }
  });
}

// Units but the tied one take slots 0 .. live_units - 1 in turn.
TEST_P(Leases, TakeSlotsInTurnAndMayAllBeOpenAtOnce) {
  for (const int live : {1, 2, 3}) {
    Options choice = options();
    choice.live_units = live;
    const std::uint64_t plain = hash_after(options(), train_plainly);
    EXPECT_EQ(hash_after(choice, train_plainly), plain) << live;
    if (stage() != Stage::kParameters) {
      continue;
    }
    run_each(world(), tower(), choice, [&](Rank& rank) {
      std::vector<const void*> at;
      std::vector<ParameterLease> open;
      open.push_back(rank.optimizer.parameters(unit(0), kHost));  // in a slot of its own
      for (std::size_t u = 1; u + 1 < kUnits; ++u) {
        while (open.size() > 1 && (u - 1) % static_cast<std::size_t>(live) == 0) {
          open.pop_back();
        }
        open.push_back(rank.optimizer.parameters(unit(u), kHost));
        at.push_back(open.back().data<bf16>(parameter(2 * u - 1)));
      }
      for (std::size_t i = 0; i < at.size(); ++i) {
        for (std::size_t j = 0; j < at.size(); ++j) {
          EXPECT_EQ(at[i] == at[j],
                    i % static_cast<std::size_t>(live) == j % static_cast<std::size_t>(live));
        }
      }
    });
  }
}

}  // namespace
}  // namespace zero::testing
