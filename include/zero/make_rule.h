// Makes an update rule of a functor over fp32 values: adamw(), adam(), or one of the user's own.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "zero/dtype.h"
#include "zero/error.h"
#include "zero/host_device.h"
#include "zero/isa.h"
#include "zero/update_arguments.h"
#include "zero/update_rule.h"

#ifdef __FAST_MATH__
#error "zero/make_rule.h: compile rules without -ffast-math; the library promises their bits"
#endif

#if defined(__GNUC__) && !defined(__CUDACC__)
// Tells the compiler that sqrtf leaves errno alone: else it vectorises no loop that calls it.
extern "C" [[gnu::const]] float sqrtf(float) noexcept;
#endif

namespace zero {

// The correctly rounded square root; for rules, in place of std::sqrt (which stays scalar).
ZERO_HD float square_root(float x) {
  return ::sqrtf(x);
}

// One element's arithmetic: an object holds the scalars of one parameter in one step.
//   F(hyper, step)                        hyper.lr has lr_scale in it; step counts from 1
//   propose(gradient, parameter, states)  updates states[0 .. kStates), returns the proposal
//   apply(parameter, proposal)            returns the new parameter
// All three are ZERO_HD, and use only + - * / and square_root: so bits are the same everywhere.
template <class F>
concept ElementRule = std::constructible_from<F, const Hyper&, std::int64_t> &&
    requires(const F& rule, float value, float* states) {
  { F::kStates } -> std::convertible_to<std::size_t>;
  { rule.propose(value, value, states) } -> std::same_as<float>;
  { rule.apply(value, value) } -> std::same_as<float>;
};

namespace detail {

struct FromParameter {};  // no master weights

ZERO_HD float load(float x) {
  return x;
}
ZERO_HD float load(bf16 x) {
  return to_float(x);
}
ZERO_HD void store(float& to, float x) {
  to = x;
}
ZERO_HD void store(bf16& to, float x) {
  to = to_bf16(x);
}

// What is done to every sum of gradients first.
struct Scale {
  float divisor, clip_factor;

  ZERO_HD explicit Scale(const StepScalars& s)
      : divisor(static_cast<float>(s.divisor)),
        clip_factor(s.clip_factor < 1 ? static_cast<float>(s.clip_factor) : 1.0F) {}
  ZERO_HD float operator()(float sum) const { return sum / divisor * clip_factor; }
};

// One chunk: each element is read once and written once.
template <class F, class Parameter, class Master, std::size_t... kState>
ZERO_HD void update_chunk(const UpdateArguments& a, const Chunk& c, const F& rule,
                          const Scale& scale, std::index_sequence<kState...>) {
  constexpr bool kHasMaster = std::is_same_v<Master, float>;
  auto* const parameters = static_cast<Parameter*>(a.parameters) + c.parameter_at;
  float* const masters = kHasMaster ? a.master + c.state_at : nullptr;
  const float* const gradients = a.gradients + c.gradient_at;
  [[maybe_unused]] float* const columns[sizeof...(kState) + 1] = {
      static_cast<float*>(a.states[kState]) + c.state_at...};
  const std::size_t count = c.count;
#pragma GCC ivdep
  for (std::size_t i = 0; i < count; ++i) {
    float states[sizeof...(kState) + 1] = {columns[kState][i]...};
    float value = 0;
    if constexpr (kHasMaster) {
      value = masters[i];
    } else {
      value = load(parameters[i]);
    }
    value = rule.apply(value, rule.propose(scale(gradients[i]), value, states));
    ((columns[kState][i] = states[kState]), ...);
    if constexpr (kHasMaster) {
      masters[i] = value;
    }
    store(parameters[i], value);
  }
}

template <class F, class Parameter, class Master>
struct UpdateKernel {
  const UpdateArguments& a;
  std::size_t first, last;

  [[gnu::always_inline]] inline void operator()() const {
    const Scale scale(*a.scalars);
    for (std::size_t k = first; k < last; ++k) {
      const Chunk c = a.chunks[k];
      const ParameterRow row = a.rows[c.parameter];
      if (row.used == 0) {
        continue;
      }
      Hyper hyper = a.groups[row.group];
      hyper.lr *= a.scalars->lr_scale;
      update_chunk<F, Parameter, Master>(a, c, F(hyper, row.step), scale,
                                         std::make_index_sequence<F::kStates>{});
    }
  }
};

template <class F, class Parameter>
void update_parameters(Isa isa, const UpdateArguments& a, std::size_t first, std::size_t last) {
  if (a.master != nullptr) {
    run_with(isa, UpdateKernel<F, Parameter, float>{a, first, last});
  } else {
    run_with(isa, UpdateKernel<F, Parameter, FromParameter>{a, first, last});
  }
}

template <ElementRule F>
void update_with(Isa isa, const UpdateArguments& a, std::size_t first, std::size_t last) {
  if (a.parameter_dtype == DType::kFloat32) {
    return update_parameters<F, float>(isa, a, first, last);
  }
  require(a.parameter_dtype == DType::kBfloat16,
          "update of parameters in " + std::string(name_of(a.parameter_dtype)) +
              ": expected fp32 or bf16; change the group's precision");
  update_parameters<F, bf16>(isa, a, first, last);
}

template <ElementRule F>
void update_on_cpu(const UpdateArguments& a, std::size_t first, std::size_t last) {
  update_with<F>(best_isa(), a, first, last);
}

}  // namespace detail

// A rule of one fused pass, with one fp32 state for each of `states`.
// Throws: UsageError unless there are F::kStates names
template <ElementRule F>
[[nodiscard]] UpdateRule make_rule(std::string name, const std::vector<std::string>& states) {
  static_assert(F::kStates <= std::tuple_size_v<decltype(UpdateArguments::states)>);
  require(states.size() == F::kStates, "rule \"" + name + "\": expected " +
                                           std::to_string(F::kStates) + " state names, found " +
                                           std::to_string(states.size()));
  UpdateRule rule;
  rule.name = std::move(name);
  rule.cpu = detail::update_on_cpu<F>;
  for (const std::string& state : states) {
    rule.states.push_back({state, DType::kFloat32, 1});
  }
  return rule;
}

}  // namespace zero
