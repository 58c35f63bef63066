// A rule of the user's own, made outside the library from public headers.
#include "zero/make_rule.h"

#include <gtest/gtest.h>

#include "zero/cpu.h"

#include "tests/memory/step_case.h"

namespace zero::testing {
namespace {

// SGD with momentum and decoupled weight decay.
struct MomentumSgd {
  static constexpr std::size_t kStates = 1;
  float lr, momentum, decay;

  ZERO_HD MomentumSgd(const Hyper& h, std::int64_t /*step*/)
      : lr(static_cast<float>(h.lr)),
        momentum(static_cast<float>(h.momentum)),
        decay(static_cast<float>(1 - h.lr * h.weight_decay)) {}
  ZERO_HD float propose(float gradient, float /*parameter*/, float* states) const {
    states[0] = momentum * states[0] + gradient;
    return states[0];
  }
  ZERO_HD float apply(float parameter, float proposal) const {
    return parameter * decay - lr * proposal;
  }
};
void plain_momentum(const Hyper& h, std::int64_t, float g, float& value, float* s) {
  s[0] = static_cast<float>(h.momentum) * s[0] + g;
  value = value * static_cast<float>(1 - h.lr * h.weight_decay) - static_cast<float>(h.lr) * s[0];
}

// Without any state; the learning rate falls with the step.
struct PlainSgd {
  static constexpr std::size_t kStates = 0;
  float lr;

  ZERO_HD PlainSgd(const Hyper& h, std::int64_t step)
      : lr(static_cast<float>(h.lr / static_cast<double>(step))) {}
  ZERO_HD float propose(float gradient, float, float*) const { return gradient; }
  ZERO_HD float apply(float parameter, float proposal) const { return parameter - lr * proposal; }
};
void plain_sgd(const Hyper& h, std::int64_t step, float g, float& value, float*) {
  value = value - static_cast<float>(h.lr / static_cast<double>(step)) * g;
}

// As many states as there can be.
struct FourStates {
  static constexpr std::size_t kStates = 4;
  float lr;

  ZERO_HD FourStates(const Hyper& h, std::int64_t) : lr(static_cast<float>(h.lr)) {}
  ZERO_HD float propose(float gradient, float parameter, float* states) const {
    states[0] = states[0] + gradient;
    states[1] = states[0] * parameter;
    states[2] = square_root(states[2]) + states[1];
    states[3] = states[3] / (1 + states[2] * states[2]);
    return states[3];
  }
  ZERO_HD float apply(float parameter, float proposal) const { return parameter - lr * proposal; }
};
void plain_four(const Hyper& h, std::int64_t, float g, float& value, float* s) {
  s[0] = s[0] + g;
  s[1] = s[0] * value;
  s[2] = std::sqrt(s[2]) + s[1];
  s[3] = s[3] / (1 + s[2] * s[2]);
  value = value - static_cast<float>(h.lr) * s[3];
}

struct Users {
  UpdateRule rule;
  PlainRule plain;
};
std::vector<Users> rules() {
  return {{make_rule<MomentumSgd>("momentum_sgd", {"momentum_buffer"}), plain_momentum},
          {make_rule<PlainSgd>("plain_sgd", {}), plain_sgd},
          {make_rule<FourStates>("four", {"a", "b", "c", "d"}), plain_four}};
}

TEST(MakeRule, UpdatesToTheBitsOfAPlainLoop) {
  for (const Users& users : rules()) {
    for (const int threads : {1, 2, 3}) {
      for (const bool low : {false, true}) {
        StepCase c = usual_step_case(5);
        c.state_count = users.rule.states.size();
        c.dtype = low ? DType::kBfloat16 : DType::kFloat32;
        c.has_master = low;
        c.scalars = {.divisor = 3, .clip_factor = 0.5, .lr_scale = 2};
        for (ParameterRow& row : c.rows) {
          row.step += 1;
        }
        const auto backend = make_cpu_backend(kUnlimited, threads);
        const DeviceStep step(*backend, c);
        backend->update(users.rule, step.arguments, kHost);
        EXPECT_EQ(differ(step.read(), plain_update(c, users.plain)), "") << users.rule.name;
      }
    }
  }
}

TEST(MakeRule, GivesTheSameBitsOnEveryInstructionSet) {
  StepCase c = usual_step_case(6);
  c.state_count = 4;
  const auto backend = make_cpu_backend();
  for (const Isa isa : {Isa::kBaseline, Isa::kAvx2, Isa::kAvx512}) {
    if (supports(isa)) {
      const DeviceStep step(*backend, c);
      detail::update_with<FourStates>(isa, step.arguments, 0, c.chunks.size());
      EXPECT_EQ(differ(step.read(), plain_update(c, plain_four)), "") << static_cast<int>(isa);
    }
  }
}

TEST(MakeRule, DescribesTheRuleToThePlan) {
  const UpdateRule rule = rules()[0].rule;
  EXPECT_EQ(rule.name, "momentum_sgd");
  ASSERT_EQ(rule.states.size(), 1U);
  EXPECT_EQ(rule.states[0].name, "momentum_buffer");
  ModelSpec model;
  const GroupId group = model.add_group("all", {.rule = rule});
  const UnitId unit = model.add_unit("layer");
  (void)model.add(unit, "w", {1000}, group);
  const Plan plan = make_plan(model, {.stage = Stage::kStates}, {.shard_ranks = 2});
  EXPECT_EQ(plan.formula_bytes(Category::kStates), 2000U) << "one fp32 state over two ranks";
}

TEST(MakeRule, RefusesAWrongNumberOfStateNames) {
  try {
    (void)make_rule<MomentumSgd>("momentum_sgd", {"a", "b"});
    FAIL();
  } catch (const UsageError& e) {
    EXPECT_STREQ(e.what(), "rule \"momentum_sgd\": expected 1 state names, found 2");
  }
}

TEST(MakeRule, RefusesADtypeThatItCannotUpdate) {
  const auto backend = make_cpu_backend();
  const DeviceStep step(*backend, usual_step_case(7));
  UpdateArguments arguments = step.arguments;
  arguments.parameter_dtype = DType::kFloat16;
  EXPECT_THROW(backend->update(adamw(), arguments, kHost), UsageError);
}

}  // namespace
}  // namespace zero::testing
