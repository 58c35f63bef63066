// Tied weights: one unit whose gradient comes in several leases, far apart.
#include <tuple>

#include <gtest/gtest.h>

#include "tests/support/compare.h"
#include "tests/support/trainer.h"

namespace zero::testing {
namespace {

constexpr UnitId kTied{0}, kHidden{1};

// An embedding that is also the head, and what is between the two.
ModelSpec tied_model() {
  ModelSpec model;
  const GroupId all = model.add_group("all", {.hyper = {.lr = 0.1, .weight_decay = 0.1}});
  model.add(model.add_unit("wte", GradientLife::kUntilReady), "wte.w", {700}, all);
  model.add(model.add_unit("h"), "h.w", {300}, all);
  return model;
}

class Tied : public ::testing::TestWithParam<std::tuple<Stage, int>> {
 protected:
  static Options options() {
    Options options{.stage = std::get<0>(GetParam()),
                    .numerics = Numerics::kStageInvariant,
                    .clip_norm = 1.0,
                    .max_open_micro_batches = 2};
    options.bucket_bytes = 1;
    return options;
  }
  static int world() { return std::get<1>(GetParam()); }

  // Adds the gradient of a micro-batch, or one half of it. Returns: where
  static float* add(Trainer& t, MicroBatch& micro, UnitId unit, int m, detail::Part part) {
    GradientLease lease = micro.gradients(unit, kHost);
    const ParameterId p{static_cast<std::uint32_t>(index(unit))};  // one a unit
    float* out = lease.data<float>(p);
    std::vector<float> values(t.model().parameters()[index(p)].count);
    random_gradient({0, std::int64_t{m} * t.ranks().world() + t.ranks().rank(), p}, values);
    detail::mask(values, part);
    for (std::size_t i = 0; i < values.size(); ++i) {
      out[i] += values[i];
    }
    return out;
  }

  // Head, hidden, embedding of one micro-batch after the other.
  static std::uint64_t in_turn() {
    std::uint64_t hash = 0;
    train(tied_model(), options(), world(), [&](Trainer& t) {
      for (int m = 0; m < 2; ++m) {
        MicroBatch micro = t.optimizer().begin_micro_batch();
        add(t, micro, kTied, m, detail::Part::kAll);
        add(t, micro, kHidden, m, detail::Part::kAll);
        micro.ready(kHidden, kHost);
        micro.ready(kTied, kHost);
      }
      EXPECT_TRUE(t.step().applied);
      keep_hash(t, hash);
    });
    return hash;
  }
  static void keep_hash(Trainer& t, std::uint64_t& into) {
    const std::uint64_t hash = t.optimizer().state_hash();
    if (t.ranks().rank() == 0) {
      into = hash;
    }
  }
};

TEST_P(Tied, UnitsKeepTheSameMemoryInAllLeasesOfAMicroBatch) {
  train(tied_model(), options(), world(), [&](Trainer& t) {
    MicroBatch micro = t.optimizer().begin_micro_batch();
    const float* head = add(t, micro, kTied, 0, detail::Part::kEven);
    const float first = head[0];
    add(t, micro, kHidden, 0, detail::Part::kAll);
    micro.ready(kHidden, kHost);
    EXPECT_EQ(add(t, micro, kTied, 0, detail::Part::kOdd), head);
    EXPECT_EQ(head[0], first);
    micro.ready(kTied, kHost);
    EXPECT_TRUE(t.step().applied);
  });
}

// Both heads have been written when the first embedding is.
TEST_P(Tied, UnitsKeepAGradientOfTheirOwnInEachOpenMicroBatch) {
  std::uint64_t hash = 1;
  train(tied_model(), options(), world(), [&](Trainer& t) {
    MicroBatch first = t.optimizer().begin_micro_batch();
    MicroBatch second = t.optimizer().begin_micro_batch();
    MicroBatch* const micros[] = {&first, &second};
    float* heads[2] = {};
    for (int m = 0; m < 2; ++m) {
      heads[m] = add(t, *micros[m], kTied, m, detail::Part::kEven);
    }
    EXPECT_NE(heads[0], heads[1]);
    for (int m = 0; m < 2; ++m) {
      add(t, *micros[m], kHidden, m, detail::Part::kAll);
      micros[m]->ready(kHidden, kHost);
      EXPECT_EQ(add(t, *micros[m], kTied, m, detail::Part::kOdd), heads[m]);
      micros[m]->ready(kTied, kHost);
    }
    EXPECT_TRUE(t.step().applied);
    keep_hash(t, hash);
  });
  EXPECT_EQ(hash, in_turn());
}

INSTANTIATE_TEST_SUITE_P(Grid, Tied,
                         ::testing::Combine(::testing::ValuesIn(kAllStages),
                                            ::testing::Values(1, 2, 3, 4)));

}  // namespace
}  // namespace zero::testing
