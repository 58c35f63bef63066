// One rank's part of a step on the host: tables and arrays that a test fills, sends to a backend
// and reads back.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "zero/plan.h"
#include "zero/update_arguments.h"

#include "tests/memory/arrays.h"

namespace zero::testing {

struct StepCase {
  DType dtype = DType::kFloat32;
  bool has_master = false;
  std::size_t state_count = 2;
  int rank = 0, world = 1;
  std::vector<float> parameters, gradients, master;  // parameters as fp32
  std::array<std::vector<float>, 4> states;
  std::vector<Chunk> chunks;
  std::size_t measured_chunks = 0;
  std::vector<ParameterRow> rows;
  std::vector<Hyper> groups;
  StepInputs inputs;
  StepScalars scalars;
  std::vector<std::int64_t> control;
};

// One parameter for each of `counts`, each at a multiple of 256 elements; the arrays start at
// different offsets, as they do at stages 1 and 2. Every state is >= 0.
[[nodiscard]] inline StepCase make_step_case(const std::vector<std::size_t>& counts,
                                             std::uint32_t seed) {
  StepCase out;
  std::uint64_t end = 0;
  for (std::uint32_t p = 0; p < counts.size(); ++p) {
    for (std::uint64_t first = 0; first < counts[p]; first += kChunkElements) {
      out.chunks.push_back({.parameter_at = 512 + end + first,
                            .gradient_at = 256 + end + first,
                            .state_at = end + first,
                            .first = first,
                            .count = static_cast<std::uint32_t>(
                                std::min<std::uint64_t>(kChunkElements, counts[p] - first)),
                            .parameter = p});
    }
    end += (counts[p] + kGranule - 1) / kGranule * kGranule;
    out.rows.push_back({.step = p, .group = p % 2, .used = 1});
  }
  out.measured_chunks = out.chunks.size();
  out.groups = {{.lr = 1e-2, .weight_decay = 0.1}, {.lr = 3e-3, .beta1 = 0.8, .momentum = 0.7}};
  out.control.resize(ControlLayout::words(1, counts.size()));
  const auto noise = [&](std::size_t count, float scale) {
    std::vector<float> values(count);
    std::mt19937 random(++seed);
    for (float& x : values) {
      x = scale * (static_cast<float>(random() % 20'001) / 10'000.0F - 1);
    }
    return values;
  };
  out.parameters = noise(512 + end, 1);
  out.gradients = noise(256 + end, 0.1F);
  out.master = noise(end, 1);
  for (std::vector<float>& state : out.states) {
    state = noise(end, 1e-3F);
    for (float& x : state) {
      x = std::abs(x);
    }
  }
  return out;
}

// Parameters of none, one, and many elements and chunks.
[[nodiscard]] inline StepCase usual_step_case(std::uint32_t seed) {
  return make_step_case({0, 1, 255, 256, 257, 1009, 65'537, 3}, seed);
}

// The case in a backend's memory.
class DeviceStep {
 public:
  DeviceStep(Backend& backend, const StepCase& c) : backend_(backend), case_(c) {
    arguments.parameters =
        keep(parameters_, c.dtype == DType::kBfloat16 ? upload(backend, rounded(c.parameters))
                                                      : upload(backend, c.parameters));
    arguments.parameter_dtype = c.dtype;
    arguments.gradients = static_cast<const float*>(keep(gradients_, upload(backend, c.gradients)));
    if (c.has_master) {
      arguments.master = static_cast<float*>(keep(master_, upload(backend, c.master)));
    }
    for (std::size_t s = 0; s < c.state_count; ++s) {
      arguments.states.at(s) = keep(states_.at(s), upload(backend, c.states.at(s)));
    }
    arguments.chunks = static_cast<const Chunk*>(keep(chunks_, upload(backend, c.chunks)));
    arguments.measured_chunks = c.measured_chunks;
    arguments.chunk_count = c.chunks.size();
    arguments.rows = static_cast<ParameterRow*>(keep(rows_, upload(backend, c.rows)));
    arguments.row_count = c.rows.size();
    arguments.groups = static_cast<const Hyper*>(keep(groups_, upload(backend, c.groups)));
    arguments.inputs = static_cast<const StepInputs*>(
        keep(inputs_, upload(backend, std::vector<StepInputs>{c.inputs})));
    arguments.scalars = static_cast<StepScalars*>(
        keep(scalars_, upload(backend, std::vector<StepScalars>{c.scalars})));
    arguments.control = static_cast<std::int64_t*>(keep(control_, upload(backend, c.control)));
    arguments.rank = c.rank;
    arguments.world = c.world;
  }

  // The case with what the backend's memory holds now.
  [[nodiscard]] StepCase read() const {
    StepCase out = case_;
    if (case_.dtype == DType::kBfloat16) {
      const auto low = download<bf16>(backend_, parameters_);
      std::transform(low.begin(), low.end(), out.parameters.begin(),
                     [](bf16 x) { return to_float(x); });
    } else {
      out.parameters = download<float>(backend_, parameters_);
    }
    if (case_.has_master) {
      out.master = download<float>(backend_, master_);
    }
    for (std::size_t s = 0; s < case_.state_count; ++s) {
      out.states.at(s) = download<float>(backend_, states_.at(s));
    }
    out.rows = download<ParameterRow>(backend_, rows_);
    out.scalars = download<StepScalars>(backend_, scalars_)[0];
    out.control = download<std::int64_t>(backend_, control_);
    return out;
  }

  UpdateArguments arguments;

 private:
  static void* keep(Buffer& to, Buffer from) {
    to = std::move(from);
    return to.data();
  }

  Backend& backend_;
  StepCase case_;
  Buffer parameters_, gradients_, master_, chunks_, rows_, groups_, inputs_, scalars_, control_;
  std::array<Buffer, 4> states_;
};

// "" when all bits of parameters, masters and states agree, padding included.
[[nodiscard]] inline std::string differ(const StepCase& found, const StepCase& expected) {
  std::string out = differ(found.parameters, expected.parameters);
  out = out.empty() ? "" : "parameters" + out;
  const auto next = [&](const std::string& name, const auto& a, const auto& b) {
    const std::string d = out.empty() ? differ(a, b) : "";
    out = d.empty() ? out : name + d;
  };
  next("master", found.master, expected.master);
  for (std::size_t s = 0; s < found.states.size(); ++s) {
    next("state " + std::to_string(s), found.states.at(s), expected.states.at(s));
  }
  return out;
}

// How a test updates one element: (hyper with lr_scale, step, gradient, value, states).
using PlainRule = void (*)(const Hyper&, std::int64_t, float, float&, float*);

// The whole update, an element at a time.
[[nodiscard]] inline StepCase plain_update(StepCase c, PlainRule rule) {
  if (c.dtype == DType::kBfloat16) {
    for (float& x : c.parameters) {
      x = to_float(to_bf16(x));
    }
  }
  for (const Chunk& chunk : c.chunks) {
    const ParameterRow& row = c.rows[chunk.parameter];
    Hyper hyper = c.groups[row.group];
    hyper.lr *= c.scalars.lr_scale;
    for (std::size_t i = 0; i < chunk.count && row.used != 0 && c.scalars.skip == 0; ++i) {
      float g = c.gradients[chunk.gradient_at + i] / static_cast<float>(c.scalars.divisor);
      if (c.scalars.clip_factor < 1) {
        g = g * static_cast<float>(c.scalars.clip_factor);
      }
      float& parameter = c.parameters[chunk.parameter_at + i];
      float value = c.has_master ? c.master[chunk.state_at + i] : parameter;
      float states[4] = {};
      for (std::size_t s = 0; s < c.state_count; ++s) {
        states[s] = c.states.at(s)[chunk.state_at + i];
      }
      rule(hyper, row.step, g, value, states);
      for (std::size_t s = 0; s < c.state_count; ++s) {
        c.states.at(s)[chunk.state_at + i] = states[s];
      }
      if (c.has_master) {
        c.master[chunk.state_at + i] = value;
      }
      parameter = c.dtype == DType::kBfloat16 ? to_float(to_bf16(value)) : value;
    }
  }
  return c;
}

// Kingma and Ba 2015, Loshchilov and Hutter 2019, in fp32; scalars in double, rounded once.
[[nodiscard]] inline double plain_power(double base, std::int64_t exponent) {
  double out = 1;
  for (; exponent > 0; exponent /= 2, base *= base) {
    out = exponent % 2 == 1 ? out * base : out;
  }
  return out;
}
inline void plain_averages(const Hyper& h, std::int64_t step, float g, float& value, float* s) {
  s[0] = static_cast<float>(h.beta1) * s[0] + static_cast<float>(1 - h.beta1) * g;
  s[1] = static_cast<float>(h.beta2) * s[1] + static_cast<float>(1 - h.beta2) * (g * g);
  const auto correction = static_cast<float>(std::sqrt(1 - plain_power(h.beta2, step)));
  const float root = std::sqrt(s[1]) / correction;
  value = value - static_cast<float>(h.lr / (1 - plain_power(h.beta1, step))) *
                      (s[0] / (root + static_cast<float>(h.eps)));
}
inline void plain_adamw(const Hyper& h, std::int64_t step, float g, float& value, float* s) {
  value = value * static_cast<float>(1 - h.lr * h.weight_decay);
  plain_averages(h, step, g, value, s);
}
inline void plain_adam(const Hyper& h, std::int64_t step, float g, float& value, float* s) {
  plain_averages(h, step, g + static_cast<float>(h.weight_decay) * value, value, s);
}

}  // namespace zero::testing
