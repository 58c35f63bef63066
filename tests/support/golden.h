// Optimizer trajectories of PyTorch (tests/golden/optimizers) as set-ups of the harness.
#pragma once

#include <fstream>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "zero/safetensors.h"

#include "tests/support/oracle.h"

namespace zero::testing {

// One case; the README beside the data says what each part means.
struct GoldenCase {
  std::string name;
  double tolerance = 0;
  int steps = 0, micro_batches = 0;
  std::optional<double> clip;
  bool decoupled = true;
  Precision precision{};
  std::vector<Hyper> groups;
  std::vector<std::string> parameters;  // by ParameterId
  std::vector<std::size_t> group_of;    // by ParameterId
  std::vector<double> norms;            // by step
  std::vector<std::vector<double>> lr;  // by step and group
  std::vector<std::vector<std::size_t>> shapes;
  Tensors initial;
  std::vector<std::vector<Tensors>> gradients;              // by step and micro-batch
  std::map<int, std::vector<std::vector<double>>> checked;  // steps done -> parameters
  std::map<std::string, std::vector<std::vector<double>>> states;
};

[[nodiscard]] inline std::string golden_folder() {
  return ZERO_SOURCE_DIR "/tests/golden/optimizers/";
}

[[nodiscard]] inline nlohmann::json golden_index() {
  std::ifstream file(golden_folder() + "cases.json");
  return nlohmann::json::parse(file).at("cases");
}

namespace detail {

template <class Value>
std::vector<Value> read_tensor(const SafetensorsReader& reader, const std::string& name) {
  std::vector<Value> out(reader.tensors().at(name).count());
  reader.read(name, 0, std::span(out));
  return out;
}

inline void read_groups(const nlohmann::json& json, GoldenCase& out) {
  for (const nlohmann::json& group : json.at("groups")) {
    out.groups.push_back({.weight_decay = group.at("weight_decay"),
                          .beta1 = group.at("betas").at(0),
                          .beta2 = group.at("betas").at(1),
                          .eps = group.at("eps")});
    for (const nlohmann::json& parameter : group.at("parameters")) {
      out.parameters.push_back(parameter);
      out.group_of.push_back(out.groups.size() - 1);
    }
  }
  for (const nlohmann::json& step : json.at("per_step")) {
    out.norms.push_back(step.at("grad_norm"));
    out.lr.push_back(step.at("lr"));
  }
}

inline void read_tensors(GoldenCase& out) {
  const SafetensorsReader reader(golden_folder() + out.name + ".safetensors");
  for (const std::string& p : out.parameters) {
    out.shapes.push_back(reader.tensors().at("init/" + p).shape);
    out.initial.push_back(read_tensor<float>(reader, "init/" + p));
    for (const char* state : {"exp_avg", "exp_avg_sq"}) {
      out.states[state].push_back(
          read_tensor<double>(reader, std::string("state/") + state + "/" + p));
    }
    for (int k = 1; k <= out.steps; ++k) {
      const std::string key = "param/" + std::to_string(k) + "/" + p;
      if (reader.tensors().contains(key)) {
        out.checked[k].push_back(read_tensor<double>(reader, key));
      }
    }
  }
  for (int s = 0; s < out.steps; ++s) {
    out.gradients.emplace_back(out.micro_batches);
    for (int m = 0; m < out.micro_batches; ++m) {
      for (const std::string& p : out.parameters) {
        const std::string key = "grad/" + std::to_string(s) + "/" + std::to_string(m) + "/" + p;
        out.gradients.back()[static_cast<std::size_t>(m)].push_back(
            read_tensor<float>(reader, key));
      }
    }
  }
}

}  // namespace detail

// Throws: when the case, or a tensor of it, is not there
[[nodiscard]] inline GoldenCase load_golden(const std::string& name) {
  const nlohmann::json json = golden_index().at(name);
  GoldenCase out;
  out.name = name;
  out.tolerance = json.at("tolerance");
  out.steps = json.at("steps");
  out.micro_batches = json.at("micro_batches");
  if (!json.at("clip").is_null()) {
    out.clip = json.at("clip").get<double>();
  }
  out.decoupled = json.at("optimizer") == "AdamW";
  out.precision = json.at("parameter_dtype") == "bfloat16" ? kBf16WithMaster : kFloat32Only;
  detail::read_groups(json, out);
  detail::read_tensors(out);
  return out;
}

// What rank r of W contributes of element i, as a multiple: exact, unlike between ranks, sum W.
// Requires: world 1, 3 or 4
[[nodiscard]] inline float golden_factor(int world, std::int64_t rank, std::size_t i) {
  static constexpr float kThree[] = {4, -2, 1}, kFour[] = {4, -2, 1, 1};
  const std::size_t at = (static_cast<std::size_t>(rank) + i) % static_cast<std::size_t>(world);
  return world == 1 ? 1.0F : world == 3 ? kThree[at] : kFour[at];
}

// Requires: `golden` outlives the set-up; world 1, 3 or 4
[[nodiscard]] inline RunSetup golden_setup(const GoldenCase& golden, int world, Stage stage) {
  RunSetup setup{.world = world, .micro_batches = golden.micro_batches, .steps = golden.steps};
  for (std::size_t g = 0; g < golden.groups.size(); ++g) {
    setup.model.add_group(std::to_string(g), {.hyper = golden.groups[g],
                                              .rule = golden.decoupled ? adamw() : adam(),
                                              .precision = golden.precision});
  }
  UnitId unit{};
  for (std::size_t p = 0; p < golden.parameters.size(); ++p) {
    unit = p % 2 == 0 ? setup.model.add_unit("unit of " + golden.parameters[p]) : unit;
    setup.model.add(unit, golden.parameters[p], golden.shapes[p],
                    GroupId{static_cast<std::uint32_t>(golden.group_of[p])});
    if (p == 0) {
      for (const auto& checked : golden.checked) {
        setup.snapshots.insert(checked.first);
      }
    }
  }
  setup.options.stage = stage;
  setup.options.clip_norm = golden.clip;
  setup.options.bucket_bytes = 1024;
  setup.schedule = [&golden](int step, GroupId g, Hyper& hyper) {
    hyper.lr = golden.lr.at(static_cast<std::size_t>(step)).at(index(g));
  };
  setup.initial = [&golden](ParameterId p, std::uint64_t first, std::span<float> out) {
    std::copy_n(golden.initial[index(p)].begin() + static_cast<std::ptrdiff_t>(first), out.size(),
                out.begin());
  };
  setup.gradient = [&golden, world](const GradientAt& at, std::span<float> out) {
    const auto micro = static_cast<std::size_t>(at.global_micro / world);
    const std::vector<float>& g =
        golden.gradients[static_cast<std::size_t>(at.step)][micro][index(at.parameter)];
    for (std::size_t i = 0; i < out.size(); ++i) {
      out[i] = golden_factor(world, at.global_micro % world, i) * g[i] + 0.0F;
    }
  };
  return setup;
}

}  // namespace zero::testing
