// Small models with every odd case in them, and gradients that depend on nothing but their address.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "zero/model.h"

namespace zero::testing {

// Which gradient: of step `step` (from 0), global micro-batch `micro` * W + rank.
struct GradientAt {
  std::int64_t step = 0;
  std::int64_t global_micro = 0;
  ParameterId parameter{};
};
// Fills all elements of one parameter's gradient. Never -0: adding it to a zeroed lease gives +0.
using Gradient = std::function<void(const GradientAt&, std::span<float>)>;

// A good 64-bit mix of a 64-bit word. Source: Steele et al. 2014, SplitMix64
[[nodiscard]] constexpr std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15U;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31);
}

[[nodiscard]] constexpr std::uint64_t mix_at(const GradientAt& at) {
  return mix(mix(mix(static_cast<std::uint64_t>(at.step) + 1) +
                 static_cast<std::uint64_t>(at.global_micro)) +
             index(at.parameter));
}

// Full 24-bit mantissas in [-1, 1) times a magnitude of 1, 1/10 or 1/100 by parameter: every sum
// rounds, so an order that differs shows.
inline void random_gradient(const GradientAt& at, std::span<float> out) {
  const std::uint64_t seed = mix_at(at);
  const float magnitude = index(at.parameter) % 3 == 0   ? 1.0F
                          : index(at.parameter) % 3 == 1 ? 0.1F
                                                         : 0.01F;
  for (std::size_t i = 0; i < out.size(); ++i) {
    const auto bits = static_cast<std::int32_t>(mix(seed + i) >> 39) - (1 << 24);
    out[i] = magnitude * (static_cast<float>(bits) * 0x1p-24F) + 0.0F;
  }
}

// Integers in [-16, 16] times 2^-(p mod 4): sums of up to 2^18 of them are exact in fp32, in any
// order, and each value is exact in bf16.
inline void exact_gradient(const GradientAt& at, std::span<float> out) {
  const std::uint64_t seed = mix_at(at);
  const float unit = std::ldexp(1.0F, -static_cast<int>(index(at.parameter) % 4));
  for (std::size_t i = 0; i < out.size(); ++i) {
    const auto integer = static_cast<std::int32_t>(mix(seed + i) % 33) - 16;
    out[i] = unit * static_cast<float>(integer) + 0.0F;
  }
}

// Initial values in (-1/2, 1/2) that bf16 represents exactly.
inline void initial_values(ParameterId p, std::uint64_t first, std::span<float> out) {
  for (std::size_t i = 0; i < out.size(); ++i) {
    const std::uint64_t bits = mix((std::uint64_t{index(p)} << 40U) + first + i);
    out[i] = (static_cast<float>(bits % 255) - 127.0F) / 256.0F;
  }
}

// Groups: "decay" (precision), "plain" (fp32, no decay: mixed dtypes when precision is bf16), "l2"
// (Adam, precision), "frozen" (precision) and an empty one. Units: a tied one (kUntilReady), frozen
// parameters between trained ones and alone in a unit, a scalar, an empty parameter, sizes below
// and between multiples of W and 256, and two parameters, "never" and "sometimes", that go unused.
[[nodiscard]] inline ModelSpec odd_model(Precision precision) {
  ModelSpec model;
  const GroupId decay = model.add_group(
      "decay", {.hyper = {.lr = 1e-2, .weight_decay = 0.1, .beta2 = 0.95}, .precision = precision});
  const GroupId plain =
      model.add_group("plain", {.hyper = {.lr = 3e-3, .beta1 = 0.8, .beta2 = 0.99, .eps = 1e-6}});
  const GroupId l2 = model.add_group(
      "l2", {.hyper = {.lr = 2e-3, .weight_decay = 0.05}, .rule = adam(), .precision = precision});
  const GroupId frozen =
      model.add_group("frozen", {.precision = precision, .train = Train::kFrozen});
  model.add_group("empty", {.precision = precision});
  const UnitId embed = model.add_unit("embed", GradientLife::kUntilReady);
  model.add(embed, "wte", {37, 9}, decay);
  const UnitId h0 = model.add_unit("h.0");
  model.add(h0, "h.0.w", {17, 23}, decay);
  model.add(h0, "h.0.base", {19, 7}, frozen);
  model.add(h0, "h.0.b", {23}, plain);
  model.add(h0, "h.0.nothing", {0, 5}, plain);
  const UnitId h1 = model.add_unit("h.1");
  model.add(h1, "h.1.w", {257}, decay);
  model.add(h1, "h.1.scale", {}, plain);
  model.add(h1, "never", {31}, decay);
  model.add(h1, "sometimes", {33}, decay);
  const UnitId h2 = model.add_unit("h.2");
  model.add(h2, "h.2.base", {300}, frozen);
  const UnitId h3 = model.add_unit("h.3");
  model.add(h3, "h.3.w", {701, 3}, l2);
  const UnitId last = model.add_unit("ln_f");
  model.add(last, "ln_f.w", {1}, plain);
  model.add(last, "ln_f.b", {5}, plain);
  return model;
}

// For odd_model: "never" takes part nowhere; "sometimes" in global micro-batches that are multiples
// of 3 in even steps, so in odd steps on no rank.
[[nodiscard]] inline bool odd_model_unused(const ModelSpec& model, const GradientAt& at) {
  const std::string& name = model.parameters()[index(at.parameter)].name;
  return name == "never" || (name == "sometimes" && (at.step % 2 == 1 || at.global_micro % 3 != 0));
}

// One plain fp32 AdamW group, one unit a parameter.
[[nodiscard]] inline ModelSpec plain_model(const std::vector<std::size_t>& counts, Hyper hyper = {},
                                           Precision precision = {}) {
  ModelSpec model;
  const GroupId group = model.add_group("all", {.hyper = hyper, .precision = precision});
  for (std::size_t i = 0; i < counts.size(); ++i) {
    const UnitId unit = model.add_unit("u." + std::to_string(i));
    model.add(unit, "p." + std::to_string(i), {counts[i]}, group);
  }
  return model;
}

}  // namespace zero::testing
