// The library's rules, compiled for every instruction set that this machine has.
#include "kernels/update_math.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include <gtest/gtest.h>

#include "zero/cpu.h"

#include "tests/memory/step_case.h"

namespace zero::testing {
namespace {

std::vector<Isa> instruction_sets() {
  std::vector<Isa> out;
  for (const Isa isa : {Isa::kBaseline, Isa::kAvx2, Isa::kAvx512}) {
    if (supports(isa)) {
      out.push_back(isa);
    }
  }
  return out;
}

// Every precision and several steps, clip factors and divisors.
std::vector<StepCase> cases() {
  std::vector<StepCase> out;
  for (const DType dtype : {DType::kFloat32, DType::kBfloat16}) {
    for (const bool has_master : {false, true}) {
      for (const double divisor : {1.0, 7.0, 1024.0}) {
        StepCase c = make_step_case({1, 7, 8, 9, 15, 16, 17, 31, 255, 20'000}, 1);
        c.dtype = dtype;
        c.has_master = has_master;
        c.scalars = {.divisor = divisor, .clip_factor = divisor == 7 ? 1 : 0.3, .lr_scale = 0.9};
        for (std::size_t p = 0; p < c.rows.size(); ++p) {
          c.rows[p].step = std::int64_t{1} << (3 * p);
        }
        out.push_back(std::move(c));
      }
    }
  }
  return out;
}

template <class F>
StepCase updated_with(Isa isa, const StepCase& c) {
  const auto backend = make_cpu_backend();
  const DeviceStep step(*backend, c);
  detail::update_with<F>(isa, step.arguments, 0, step.arguments.chunk_count);
  return step.read();
}

TEST(UpdateRules, GiveTheSameBitsOnEveryInstructionSet) {
  ASSERT_FALSE(instruction_sets().empty());
  for (const StepCase& c : cases()) {
    for (const Isa isa : instruction_sets()) {
      const auto set = static_cast<int>(isa);
      EXPECT_EQ(differ(updated_with<AdamW>(isa, c), plain_update(c, plain_adamw)), "") << set;
      EXPECT_EQ(differ(updated_with<Adam>(isa, c), plain_update(c, plain_adam)), "") << set;
    }
  }
}

TEST(UpdateRules, GiveTheSameBitsForSubnormalsOnEveryInstructionSet) {
  StepCase c = make_step_case({4099}, 2);
  c.rows[0].step = 1;
  for (float& g : c.gradients) {
    g *= 1e-36F;
  }
  for (const Isa isa : instruction_sets()) {
    const StepCase found = updated_with<AdamW>(isa, c);
    EXPECT_EQ(differ(found, plain_update(c, plain_adamw)), "") << static_cast<int>(isa);
  }
}

TEST(UpdateRules, GiveTheSameBitsHoweverChunksAreCut) {
  for (const int threads : {1, 2, 3}) {
    const auto backend = make_cpu_backend(kUnlimited, threads);
    const StepCase c = make_step_case({300'000, 5, 70'000, 16'384, 16'385}, 3);
    const StepCase expected = plain_update(c, plain_adamw);
    const DeviceStep step(*backend, c);
    backend->update(adamw(), step.arguments, kHost);
    EXPECT_EQ(differ(step.read(), expected), "") << threads;
  }
}

#if defined(__x86_64__)
TEST(UpdateRules, DoNotDependOnTheCallersRounding) {
  StepCase c = make_step_case({5000}, 4);
  c.rows[0].step = 3;
  for (float& g : c.gradients) {
    g *= 1e-36F;
  }
  const StepCase expected = plain_update(c, plain_adamw);
  const unsigned before = _mm_getcsr();
  for (const unsigned mode : {0x8040U, 0x6000U, 0x2000U}) {  // flush to zero; other roundings
    _mm_setcsr(before | mode);
    const auto backend = make_cpu_backend(kUnlimited, 2);  // its threads inherit the mode
    const StreamRef stream = backend->make_stream();
    const DeviceStep host(*backend, c), streamed(*backend, c);
    backend->update(adamw(), host.arguments, kHost);
    backend->update(adamw(), streamed.arguments, stream);
    backend->host_wait(backend->record(stream));
    EXPECT_EQ(_mm_getcsr() & 0xffc0U, (before | mode) & 0xffc0U) << "the caller's mode is his own";
    _mm_setcsr(before);
    EXPECT_EQ(differ(host.read(), expected), "") << mode;
    EXPECT_EQ(differ(streamed.read(), expected), "") << mode;
    backend->release_stream(stream);
  }
}
#endif

TEST(UpdateRules, NameTheirStatesAsPyTorchDoes) {
  for (const UpdateRule& rule : {adamw(), adam()}) {
    ASSERT_EQ(rule.states.size(), 2U);
    EXPECT_EQ(rule.states[0], (StateSpec{"exp_avg", DType::kFloat32, 1}));
    EXPECT_EQ(rule.states[1], (StateSpec{"exp_avg_sq", DType::kFloat32, 1}));
    EXPECT_EQ(rule.between, Between::kNothing);
  }
  EXPECT_FALSE(adamw() == adam());
}

TEST(UpdateRules, RaiseToAPowerByMultiplicationOnly) {
  for (const double base : {0.9, 0.999, 0.5, 0.0}) {
    EXPECT_EQ(power(base, 0), 1);
    EXPECT_EQ(power(base, 1), base);
    EXPECT_EQ(power(base, 2), base * base);
    EXPECT_EQ(power(base, 5), base * ((base * base) * (base * base)));
    for (const int exponent : {10, 1000, 123'457}) {
      EXPECT_NEAR(power(base, exponent), std::pow(base, exponent), 1e-12);
    }
  }
}

}  // namespace
}  // namespace zero::testing
