// Update rules as values: what AdamW, Adam or a rule of the user's own does to one element.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "zero/dtype.h"

namespace zero {

// Hyper-parameters of one group. A rule reads those that it knows.
struct Hyper {
  double lr = 1e-3;
  double weight_decay = 0;
  double beta1 = 0.9, beta2 = 0.999;
  double eps = 1e-8;
  double momentum = 0;
  std::array<double, 4> user{};
  friend bool operator==(const Hyper&, const Hyper&) = default;
};

// One optimizer state: `elements_per_value` parameter elements share a value.
struct StateSpec {
  std::string name;
  DType dtype = DType::kFloat32;
  std::uint32_t elements_per_value = 1;
  friend bool operator==(const StateSpec&, const StateSpec&) = default;
};

// What must happen between a rule's proposal and its application.
enum class Between : std::uint8_t {
  kNothing,         // one fused pass (AdamW, SGD, Lion)
  kParameterSums,   // sums per parameter over shards (LAMB)
  kWholeParameter,  // a whole matrix at its owner (Muon)
};

struct UpdateArguments;  // update_arguments.h

struct UpdateRule {
  std::string name;
  std::vector<StateSpec> states;
  Between between = Between::kNothing;
  void (*cpu)(const UpdateArguments&, std::size_t first_chunk, std::size_t last_chunk) = nullptr;
  void (*cuda)(const UpdateArguments&) = nullptr;  // null: refused on CUDA, by name

  // Rules are the same when their names and states are: a plan is compared across processes.
  friend bool operator==(const UpdateRule& a, const UpdateRule& b) {
    return a.name == b.name && a.states == b.states && a.between == b.between;
  }
};

// Decoupled weight decay. States: exp_avg, exp_avg_sq. Source: Loshchilov and Hutter 2019.
[[nodiscard]] UpdateRule adamw();
// L2 regularisation: weight_decay * parameter is added to the gradient. Source: Kingma and Ba 2015.
[[nodiscard]] UpdateRule adam();

}  // namespace zero
