// Stage 3: gathers ahead of need follow the recorded order, and are right when it changes.
#include <algorithm>
#include <numeric>
#include <set>
#include <tuple>

#include <gtest/gtest.h>

#include "tests/support/compare.h"
#include "tests/support/trainer.h"

namespace zero::testing {
namespace {

using ::testing::Combine;
using ::testing::Values;

constexpr std::uint32_t kUnits = 6;

ModelSpec model_of_six() {
  return plain_model({300, 17, 513, 64, 1000, 5}, {.lr = 0.1});
}

Options options_of(int live_units) {
  Options options{.stage = Stage::kParameters, .live_units = live_units};
  options.bucket_bytes = 1;
  return options;
}

std::vector<UnitId> order_of(std::initializer_list<std::uint32_t> units) {
  std::vector<UnitId> out;
  for (const std::uint32_t u : units) {
    out.push_back(UnitId{u});
  }
  return out;
}

void one_step(Trainer& t, int step) {
  t.forward();
  t.backward({step, t.ranks().rank(), {}}, random_gradient);
  EXPECT_TRUE(t.step().applied);
}

// What the statistics gained while `body` ran.
template <class Body>
Statistics gained(Trainer& t, Body&& body) {
  const Statistics before = t.optimizer().statistics();
  body();
  Statistics after = t.optimizer().statistics();
  after.gathers -= before.gathers;
  after.prefetches -= before.prefetches;
  after.prefetch_hits -= before.prefetch_hits;
  after.order_changes -= before.order_changes;
  return after;
}

// Every element of every unit as stage 0 holds it after as many of the same steps.
Tensors right_parameters(int world, int steps) {
  RunSetup setup{.model = model_of_six(), .world = world, .steps = steps};
  return run(setup).parameters;
}

void expect_parameters(Trainer& t, std::span<const UnitId> order, const Tensors& right) {
  for (const UnitId unit : order) {
    const ParameterLease lease = t.optimizer().parameters(unit, kHost);
    const ParameterId p{static_cast<std::uint32_t>(index(unit))};  // one a unit
    const auto* data = lease.data<float>(p);
    const std::vector<float>& expected = right.at(index(p));
    EXPECT_TRUE(std::equal(expected.begin(), expected.end(), data)) << "unit " << index(unit);
  }
}

class Prefetch : public ::testing::TestWithParam<std::tuple<int, int>> {
 protected:
  [[nodiscard]] static int world() { return std::get<0>(GetParam()); }
  [[nodiscard]] static int live_units() { return std::get<1>(GetParam()); }
  // Of units that backward finds where forward left them.
  [[nodiscard]] static std::uint64_t kept() {
    return static_cast<std::uint64_t>(std::min<int>(live_units(), kUnits));
  }
};

TEST_P(Prefetch, FollowsTheOrderFromTheSecondStepOn) {
  train(model_of_six(), options_of(live_units()), world(), [&](Trainer& t) {
    const Statistics first = gained(t, [&] { one_step(t, 0); });
    EXPECT_EQ(first.prefetches, 0U);
    EXPECT_EQ(first.prefetch_hits, 0U);
    EXPECT_EQ(first.gathers, kUnits + kUnits - kept());
    for (int step = 1; step < 4; ++step) {
      const Statistics s = gained(t, [&] { one_step(t, step); });
      EXPECT_EQ(s.gathers, first.gathers);
      // All but the first of forward, which nobody could announce after the step.
      EXPECT_EQ(s.prefetches, s.gathers - 1);
      EXPECT_EQ(s.prefetch_hits, s.gathers - 1);
      EXPECT_EQ(s.order_changes, 0U);
    }
  });
}

TEST_P(Prefetch, OfAnOrderThatChangesIsCountedAndGathersTheRightParameters) {
  const Tensors right = right_parameters(world(), 3);
  train(model_of_six(), options_of(live_units()), world(), [&](Trainer& t) {
    for (int step = 0; step < 3; ++step) {
      one_step(t, step);
    }
    const std::vector<UnitId> other = order_of({3, 0, 5, 1, 4, 2});
    const Statistics changed = gained(t, [&] { expect_parameters(t, other, right); });
    EXPECT_GT(changed.order_changes, 0U);
    EXPECT_LE(changed.order_changes, kUnits);
    t.backward({3, t.ranks().rank(), {}}, random_gradient);
    EXPECT_TRUE(t.step().applied);
    const Statistics again = gained(t, [&] { t.visit(other); });
    EXPECT_EQ(again.order_changes, 0U) << "the order is recorded anew with every pass";
    if (live_units() < static_cast<int>(kUnits)) {
      EXPECT_GT(again.prefetch_hits, 0U);
    }
  });
}

TEST_P(Prefetch, OfAUnitThatIsSkippedOrRepeatedIsRight) {
  const Tensors right = right_parameters(world(), 2);
  train(model_of_six(), options_of(live_units()), world(), [&](Trainer& t) {
    one_step(t, 0);
    one_step(t, 1);
    expect_parameters(t, order_of({0, 2, 3, 3, 3, 1, 0, 5, 4, 4, 0, 5}), right);
    t.backward({2, t.ranks().rank(), {}}, random_gradient);
    EXPECT_TRUE(t.step().applied);
  });
}

TEST_P(Prefetch, KeepsAnOrderForEachKindOfPass) {
  train(model_of_six(), options_of(live_units()), world(), [&](Trainer& t) {
    for (int step = 0; step < 4; ++step) {
      const Statistics s = gained(t, [&] { one_step(t, step); });  // backward is forward reversed
      EXPECT_EQ(s.order_changes, 0U) << step;
    }
  });
}

TEST_P(Prefetch, SeesNoChangeInEvaluationsBetweenSteps) {
  const Tensors right = right_parameters(world(), 2);
  train(model_of_six(), options_of(live_units()), world(), [&](Trainer& t) {
    one_step(t, 0);
    one_step(t, 1);
    const Statistics s = gained(t, [&] {
      for (int batch = 0; batch < 3; ++batch) {
        expect_parameters(t, t.units(), right);
      }
      one_step(t, 2);
      one_step(t, 3);
    });
    EXPECT_EQ(s.order_changes, 0U);
  });
}

// What was gathered ahead before the step is stale after it.
TEST_P(Prefetch, DoesNotCrossAStep) {
  const Tensors right = right_parameters(world(), 3);
  train(model_of_six(), options_of(live_units()), world(), [&](Trainer& t) {
    one_step(t, 0);
    one_step(t, 1);
    t.forward();
    t.backward({2, t.ranks().rank(), {}}, random_gradient);
    t.visit(order_of({0, 1, 2}));  // and 3 is on its way
    EXPECT_TRUE(t.step().applied);
    expect_parameters(t, order_of({3, 1, 2, 0, 5, 4}), right);
  });
}

TEST_P(Prefetch, DoesNotOutliveOverwrittenParameters) {
  train(model_of_six(), options_of(live_units()), world(), [&](Trainer& t) {
    one_step(t, 0);
    one_step(t, 1);
    t.visit(order_of({0, 1, 2}));
    const auto value = [](ParameterId p, std::uint64_t i) {
      return static_cast<float>(1000 * index(p) + i);
    };
    t.optimizer().overwrite_own([&](ParameterId p, std::uint64_t first, std::span<float> out) {
      for (std::size_t i = 0; i < out.size(); ++i) {
        out[i] = value(p, first + i);
      }
    });
    Tensors right;
    for (std::uint32_t p = 0; p < kUnits; ++p) {
      right.emplace_back(t.model().parameters()[p].count);
      for (std::size_t i = 0; i < right.back().size(); ++i) {
        right.back()[i] = value(ParameterId{p}, i);
      }
    }
    expect_parameters(t, order_of({3, 2, 1, 0, 4, 5}), right);
    expect_parameters(t, t.units(), right);
  });
}

// One address a slot: so no more than live_units units are ever there at once.
TEST_P(Prefetch, NeverHoldsMoreThanLiveUnits) {
  train(model_of_six(), options_of(live_units()), world(), [&](Trainer& t) {
    std::set<const void*> addresses;
    for (int step = 0; step < 3; ++step) {
      for (const UnitId unit : t.units()) {
        const ParameterLease lease = t.optimizer().parameters(unit, kHost);
        addresses.insert(lease.data<float>(ParameterId{static_cast<std::uint32_t>(index(unit))}));
      }
      t.backward({step, t.ranks().rank(), {}}, random_gradient);
      EXPECT_TRUE(t.step().applied);
    }
    EXPECT_EQ(addresses.size(), kept());
    const Plan& plan = t.optimizer().plan();
    std::uint64_t largest = 0;
    for (const UnitId unit : t.units()) {
      largest = std::max(largest, plan.unit_bytes(unit));
    }
    EXPECT_LE(plan.bytes(Category::kLiveUnits, t.ranks().rank()), largest * kept());
  });
}

INSTANTIATE_TEST_SUITE_P(Grid, Prefetch, Combine(Values(1, 2, 3, 4), Values(1, 2, 3, 8)));

TEST(PrefetchIntoAnOccupiedSlot, WaitsForTheLeaseToEnd) {
  const Tensors right = right_parameters(2, 2);
  train(model_of_six(), options_of(2), 2, [&](Trainer& t) {
    one_step(t, 0);
    one_step(t, 1);
    auto zero = std::optional(t.optimizer().parameters(UnitId{0}, kHost));  // and 1 ahead of need
    const float* held = zero->data<float>(ParameterId{0});
    const Statistics open = gained(t, [&] {
      auto one = t.optimizer().parameters(UnitId{1}, kHost);  // 2 would go where 0 is
      EXPECT_TRUE(std::equal(right[0].begin(), right[0].end(), held));
    });
    EXPECT_EQ(open.prefetch_hits, 1U);
    EXPECT_EQ(open.gathers, 0U);
    const Statistics closed = gained(t, [&] { zero.reset(); });
    EXPECT_EQ(closed.gathers, 1U);
    EXPECT_EQ(closed.prefetches, 1U);
    const Statistics hit = gained(t, [&] { expect_parameters(t, order_of({2}), right); });
    EXPECT_EQ(hit.prefetch_hits, 1U);
  });
}

TEST(PrefetchIntoAnOccupiedSlot, IsAnErrorForALeaseThatNamesBothUnits) {
  train(model_of_six(), options_of(2), 1, [&](Trainer& t) {
    const auto zero = t.optimizer().parameters(UnitId{0}, kHost);
    try {
      (void)t.optimizer().parameters(UnitId{2}, kHost);
      ADD_FAILURE() << "two leases in one slot";
    } catch (const UsageError& error) {
      for (const char* part : {"'u.0'", "'u.2'", "live_units = 2"}) {
        EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
      }
    }
  });
}

}  // namespace
}  // namespace zero::testing
