// The gradient norm from end to end: its bits, its range, and what a non-finite gradient does.
#include <bit>
#include <cmath>
#include <limits>
#include <tuple>

#include <gtest/gtest.h>

#include "tests/support/compare.h"
#include "tests/support/oracle.h"
#include "tests/support/trainer.h"

namespace zero::testing {
namespace {

using ::testing::Combine;
using ::testing::Values;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLargest = std::numeric_limits<float>::max();
constexpr float kSmallest = std::numeric_limits<float>::denorm_min();

Options options_of(Stage stage, std::optional<double> clip = {}) {
  Options options{.stage = stage, .clip_norm = clip};
  options.bucket_bytes = 3000;
  return options;
}

RunSetup setup_of(ModelSpec model, int world, Stage stage, std::optional<double> clip = {}) {
  return {.model = std::move(model), .options = options_of(stage, clip), .world = world};
}

Gradient constant(float value) {
  return [value](const GradientAt&, std::span<float> out) {
    std::fill(out.begin(), out.end(), value);
  };
}

class Norm : public ::testing::TestWithParam<std::tuple<Stage, int>> {
 protected:
  [[nodiscard]] static Stage stage() { return std::get<0>(GetParam()); }
  [[nodiscard]] static int world() { return std::get<1>(GetParam()); }
};

// The counts hold 0, 1, W - 1, W, a prime and 65537; 66049 elements in all, so that the norm of
// ones is 257 without any rounding. An element counted twice or never, or padding, would show.
TEST_P(Norm, CountsEachElementOnceAndNoPadding) {
  const auto w = static_cast<std::size_t>(world());
  std::vector<std::size_t> counts{0, 1, w - 1, w, 251, 65537};
  counts.push_back(66049 - 65537 - 251 - w - (w - 1) - 1);
  RunSetup setup = setup_of(plain_model(counts), world(), stage());
  setup.gradient = constant(1);
  EXPECT_EQ(run(setup).steps.at(0).grad_norm, 257.0);
}

TEST_P(Norm, LeavesOutFrozenParametersAndThoseNotCounted) {
  ModelSpec model;
  const GroupId trained = model.add_group("trained");
  const GroupId frozen = model.add_group("frozen", {.train = Train::kFrozen});
  const UnitId unit = model.add_unit("u");
  model.add(unit, "counted", {9}, trained);
  model.add(unit, "frozen", {700}, frozen);
  model.add(unit, "replica", {300}, trained, CountInNorm::kNo);
  model.add(unit, "also counted", {7}, trained);
  RunSetup setup = setup_of(model, world(), stage(), 1.0);
  setup.gradient = constant(2);
  EXPECT_EQ(run(setup).steps.at(0).grad_norm, 8.0);
  EXPECT_EQ("", bit_difference(model, run(setup).master, right_bits(setup).master));
}

// What a shard must never take for the whole: only the ranks' contributions together give 5.
TEST_P(Norm, IsThatOfTheMeanOverRanks) {
  RunSetup setup = setup_of(plain_model({4}), world(), stage(), 1.0);
  setup.gradient = [w = world()](const GradientAt& at, std::span<float> out) {
    const auto rank = static_cast<float>(at.global_micro);
    const auto last = static_cast<float>(w - 1);
    const float lean = rank - last / 2;  // sums to 0
    const float mean[] = {3, 4, 0, 0}, slope[] = {3, -4, 2, -2};
    for (std::size_t i = 0; i < 4; ++i) {
      out[i] = mean[i] + slope[i] * lean + 0.0F;
    }
  };
  const RunResult found = run(setup);
  EXPECT_EQ(found.steps.at(0).grad_norm, 5.0);
  EXPECT_EQ("", bit_difference(setup.model, found.states.at("exp_avg"), right_bits(setup).exp_avg));
}

TEST_P(Norm, IsNotClippedWhenItIsAtTheLimit) {
  const auto hash_of = [](std::optional<double> clip, double* norm) {
    RunSetup setup = setup_of(plain_model({16}), world(), stage(), clip);
    setup.gradient = constant(0.75F);
    const RunResult found = run(setup);
    *norm = found.steps.at(0).grad_norm;
    return found.hash;
  };
  double norm = 0;
  const std::uint64_t free = hash_of(std::nullopt, &norm);
  EXPECT_EQ(norm, 3.0);
  EXPECT_EQ(hash_of(3.0, &norm), free);
  EXPECT_EQ(norm, 3.0);
  EXPECT_NE(hash_of(2.5, &norm), free);
  EXPECT_EQ(norm, 3.0) << "measured before clipping";
}

// Squares of 1e30 are no fp32, those of the smallest subnormal are not even near it.
TEST_P(Norm, HoldsOverTheWholeRangeOfFp32) {
  struct Case {
    std::size_t count;
    float gradient;
    double norm;
  };
  const double largest = kLargest, smallest = kSmallest;
  // Sums over ranks of the largest value would overflow: its mean is checked with one rank's.
  for (const Case& c : {Case{16, 0x1p100F, 0x1p102}, Case{16, kSmallest, 4 * smallest},
                        Case{4, -0x1p-126F, 0x1p-125}, Case{1024, 0x1p-140F, 0x1p-135}}) {
    RunSetup setup = setup_of(plain_model({c.count}), world(), stage());
    setup.gradient = constant(c.gradient);
    const RunResult found = run(setup);
    EXPECT_TRUE(found.steps.at(0).applied);
    EXPECT_EQ(found.steps.at(0).grad_norm, c.norm) << c.gradient;
    EXPECT_EQ("", bit_difference(setup.model, found.master, right_bits(setup).master));
  }
  RunSetup setup = setup_of(plain_model({1}), world(), stage());
  setup.gradient = [](const GradientAt& at, std::span<float> out) {
    out[0] = at.global_micro == 0 ? kLargest : 0.0F;
  };
  EXPECT_EQ(run(setup).steps.at(0).grad_norm, largest / world());
}

TEST_P(Norm, LetsHugeGradientsBeClippedAndApplied) {
  RunSetup setup = setup_of(plain_model({300, 5, 1000}), world(), stage(), 1.0);
  setup.steps = 3;
  setup.gradient = [](const GradientAt& at, std::span<float> out) {
    random_gradient(at, out);
    for (float& g : out) {
      g *= index(at.parameter) == 1 ? 1e-30F : 1e30F;
    }
  };
  const RunResult found = run(setup);
  const OracleResult<double> right = right_values(setup);
  for (std::size_t step = 0; step < 3; ++step) {
    EXPECT_TRUE(found.steps.at(step).applied);
    EXPECT_GT(right.norms.at(step), 1e29);
    EXPECT_NEAR(found.steps.at(step).grad_norm / right.norms.at(step), 1, 1e-6);
  }
  EXPECT_EQ("", bit_difference(setup.model, found.master, right_bits(setup).master));
}

// Integer bins: a sum of squares does not depend on where parameters stand or how they are cut.
TEST_P(Norm, DoesNotDependOnTheOrderOrTheUnitsOfParameters) {
  const std::vector<std::size_t> counts{700, 1, 257, 3000, 13};
  const auto norms = [&](bool backwards, std::size_t in_a_unit) {
    ModelSpec model;
    const GroupId group = model.add_group("all");
    UnitId unit{};
    for (std::size_t i = 0; i < counts.size(); ++i) {
      const std::size_t which = backwards ? counts.size() - 1 - i : i;
      if (i % in_a_unit == 0) {
        unit = model.add_unit("u." + std::to_string(i));
      }
      model.add(unit, std::to_string(which), {counts[which]}, group);
    }
    RunSetup setup = setup_of(model, world(), stage());
    setup.gradient = [model](const GradientAt& at, std::span<float> out) {
      const int which = std::stoi(model.parameters()[index(at.parameter)].name);
      random_gradient({0, at.global_micro, static_cast<ParameterId>(which)}, out);
      for (float& g : out) {
        g *= std::ldexp(1.0F, 20 * which);  // so that a sum in order would lose the small ones
      }
    };
    return norm_bits(run(setup));
  };
  const auto first = norms(false, 1);
  EXPECT_EQ(norms(true, 1), first);
  EXPECT_EQ(norms(true, 2), first);
  EXPECT_EQ(norms(false, 5), first);
}

// A lease's memory goes on behind the parameter, up to the next multiple of 256 elements.
TEST_P(Norm, IgnoresWhateverLiesInThePadding) {
  const ModelSpec model = plain_model({19, 700});
  std::vector<std::uint64_t> hashes;
  for (const float poison : {0.0F, std::nanf("")}) {
    train(model, options_of(stage(), 1.0), world(), [&](Trainer& t) {
      for (int step = 0; step < 3; ++step) {
        MicroBatch micro = t.optimizer().begin_micro_batch({.last = Last::kYes});
        for (std::uint32_t p = 0; p < 2; ++p) {
          const std::size_t count = model.parameters()[p].count;
          {
            GradientLease lease = micro.gradients(UnitId{p}, kHost);
            float* out = lease.data<float>(ParameterId{p}, Write::kOverwrite);
            random_gradient({step, t.ranks().rank(), ParameterId{p}}, std::span(out, count));
            std::fill(out + count, out + (count + kGranule - 1) / kGranule * kGranule, poison);
          }
          micro.ready(UnitId{p}, kHost);
        }
        const StepResult result = t.step();
        EXPECT_TRUE(result.applied);
        EXPECT_FALSE(result.first_non_finite.has_value());
      }
      const std::uint64_t hash = t.optimizer().state_hash();
      if (t.ranks().rank() == 0) {
        hashes.push_back(hash);
      }
    });
  }
  ASSERT_EQ(hashes.size(), 2U);
  EXPECT_EQ(hashes[0], hashes[1]);
}

INSTANTIATE_TEST_SUITE_P(Grid, Norm,
                         Combine(Values(Stage::kReplicated, Stage::kStates, Stage::kGradients,
                                        Stage::kParameters),
                                 Values(1, 2, 3, 4, 7, 8)));

// ---- gradients that are not finite

// Where one bad value goes: element `element` of `parameter`, from global micro-batch `micro`.
struct Fault {
  std::uint32_t parameter = 0;
  std::size_t element = 0;
  std::int64_t micro = 0;
  float value = kInfinity;
};

Gradient with_faults(std::vector<Fault> faults, int in_step) {
  return [faults = std::move(faults), in_step](const GradientAt& at, std::span<float> out) {
    random_gradient(at, out);
    for (const Fault& f : faults) {
      if (at.step == in_step && at.global_micro == f.micro && index(at.parameter) == f.parameter) {
        out[f.element] = f.value;
      }
    }
  };
}

ModelSpec faulty_model() {
  ModelSpec model;
  const GroupId low =
      model.add_group("low", {.hyper = {.weight_decay = 0.1}, .precision = kBf16WithMaster});
  const GroupId full = model.add_group("full");
  const UnitId first = model.add_unit("first");
  model.add(first, "a", {3}, full);
  model.add(first, "b", {3000}, low);
  const UnitId second = model.add_unit("second");
  model.add(second, "c", {2500}, full);
  model.add(second, "replica", {40}, full, CountInNorm::kNo);
  return model;
}

// The rank that holds the element: it is the one that sees the sum.
int owner_of(const Plan& plan, const Fault& fault) {
  for (int r = 0; r < plan.world().shard_ranks; ++r) {
    for (const UnitId unit : {UnitId{0}, UnitId{1}}) {
      for (const Extent& e : plan.extents(r, unit)) {
        if (index(e.parameter) == fault.parameter && fault.element >= e.first &&
            fault.element < e.first + e.count) {
          return r;
        }
      }
    }
  }
  return -1;
}

class NonFinite : public ::testing::TestWithParam<std::tuple<Stage, int>> {
 protected:
  [[nodiscard]] static Stage stage() { return std::get<0>(GetParam()); }
  [[nodiscard]] static int world() { return std::get<1>(GetParam()); }

  static void keep_hash(Trainer& t, std::uint64_t& into) {
    const std::uint64_t hash = t.optimizer().state_hash();
    if (t.ranks().rank() == 0) {
      into = hash;
    }
  }

  // Step 0 is good and step 1 has the faults: it must change nothing on any rank, and step 2 must
  // be what it is without step 1.
  static void expect_skip(const std::vector<Fault>& faults, std::uint32_t parameter, int owner,
                          int micro_batches = 1) {
    std::uint64_t skipped = 0, never = 1;
    train(faulty_model(), options_of(stage(), 1.0), world(), [&](Trainer& t) {
      one_step(t, 0, micro_batches, random_gradient);
      const std::string before = t.snapshot();
      const StepResult bad = one_step(t, 1, micro_batches, with_faults(faults, 1));
      EXPECT_FALSE(bad.applied);
      EXPECT_TRUE(std::isnan(bad.grad_norm));
      EXPECT_EQ(bad.first_non_finite, ParameterId{parameter});
      EXPECT_EQ(bad.owner, owner);
      EXPECT_EQ(t.snapshot(), before) << "a skipped step changed a bit";
      one_step(t, 2, micro_batches, random_gradient);
      keep_hash(t, skipped);
    });
    train(faulty_model(), options_of(stage(), 1.0), world(), [&](Trainer& t) {
      one_step(t, 0, micro_batches, random_gradient);
      one_step(t, 2, micro_batches, random_gradient);
      keep_hash(t, never);
    });
    EXPECT_EQ(skipped, never);
  }

  static StepResult one_step(Trainer& t, int step, int micro_batches, const Gradient& gradient) {
    for (int m = 0; m < micro_batches; ++m) {
      t.forward();
      t.backward({step, std::int64_t{m} * world() + t.ranks().rank(), {}}, gradient,
                 m + 1 == micro_batches ? Last::kYes : Last::kNo);
    }
    const StepResult result = t.step();
    EXPECT_EQ(result.applied, !result.first_non_finite.has_value());
    return result;
  }

  [[nodiscard]] static int owner(const Fault& fault) {
    return owner_of(make_plan(faulty_model(), options_of(stage()), {.shard_ranks = world()}),
                    fault);
  }
};

TEST_P(NonFinite, ValuesAnywhereSkipTheStepOnAllRanks) {
  const std::int64_t last = world() - 1;
  for (const Fault& f : {Fault{0, 0, 0, kInfinity}, Fault{0, 2, last, -kInfinity},
                         Fault{1, 2999, last, std::nanf("")}, Fault{1, 256, 0, -kInfinity},
                         Fault{2, 2499, 0, kInfinity}, Fault{2, 1023, last, kInfinity}}) {
    SCOPED_TRACE("parameter " + std::to_string(f.parameter) + "[" + std::to_string(f.element) +
                 "] of rank " + std::to_string(f.micro));
    ASSERT_GE(owner(f), 0);
    expect_skip({f}, f.parameter, owner(f));
  }
}

TEST_P(NonFinite, ValuesInAParameterOutsideTheNormSkipTheStepToo) {
  const Fault f{3, 39, 0, kInfinity};
  expect_skip({f}, 3, owner(f));
}

TEST_P(NonFinite, ValuesInAnEarlyMicroBatchSkipTheStep) {
  const Fault f{2, 77, world() - 1, std::nanf("")};
  expect_skip({f}, 2, owner(f), 3);
}

TEST_P(NonFinite, ValuesInSeveralPlacesNameTheFirstParameterAndItsFirstRank) {
  const std::vector<Fault> faults{{2, 3, 0}, {1, 2999, 0}, {1, 1400, world() - 1}, {1, 0, 0}};
  expect_skip(faults, 1, owner(faults[3]));
  expect_skip({faults[0], faults[1], faults[2]}, 1, std::min(owner(faults[1]), owner(faults[2])));
}

// Finite on every rank, but no longer when summed.
TEST_P(NonFinite, SumsSkipTheStep) {
  const Fault f{2, 1900, 0, kLargest}, again{2, 1900, world() - 1, kLargest};
  if (world() > 1) {
    expect_skip({f, again}, 2, owner(f));
    expect_skip({{2, 5, 0, kInfinity}, {2, 5, world() - 1, -kInfinity}}, 2, owner({2, 5}));
  } else {
    // One rank: over micro-batches.
    expect_skip({f, {2, 1900, 1, kLargest}}, 2, 0, 2);
  }
}

TEST_P(NonFinite, MeansOfNoTokensSkipTheStepAndNameNoParameter) {
  train(faulty_model(), options_of(stage(), 1.0), world(), [&](Trainer& t) {
    one_step(t, 0, 1, random_gradient);
    const std::string before = t.snapshot();
    t.backward({1, t.ranks().rank(), {}}, constant(0));
    const StepResult result = t.step({.local_tokens = 0});
    EXPECT_FALSE(result.applied);
    EXPECT_FALSE(result.first_non_finite.has_value());
    EXPECT_EQ(result.owner, -1);
    EXPECT_EQ(t.snapshot(), before);
    EXPECT_TRUE(one_step(t, 2, 1, random_gradient).applied);
  });
}

TEST_P(NonFinite, LimitsOfAStepClipNothing) {
  const auto run = [&](std::optional<double> of_plan, std::optional<double> of_step) {
    std::string out;
    train(faulty_model(), options_of(stage(), of_plan), world(), [&](Trainer& t) {
      t.backward({1, t.ranks().rank(), {}}, random_gradient);
      EXPECT_TRUE(t.step({.clip_norm = of_step}).applied);
      const std::string after = t.snapshot();
      if (t.ranks().rank() == 0) {
        out = after;
      }
    });
    return out;
  };
  constexpr double kNoLimit = std::numeric_limits<double>::infinity();
  EXPECT_EQ(run(1e-3, kNoLimit), run({}, {}));
  EXPECT_NE(run(1e-3, {}), run({}, {}));
}

INSTANTIATE_TEST_SUITE_P(Grid, NonFinite,
                         Combine(Values(Stage::kReplicated, Stage::kStates, Stage::kGradients,
                                        Stage::kParameters),
                                 Values(1, 2, 3, 4)));

}  // namespace
}  // namespace zero::testing
