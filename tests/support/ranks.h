// Small tools for tests that write their own training loop on every rank.
#pragma once

#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "zero/zero.h"

#include "tests/support/models.h"
#include "tests/support/time_scale.h"
#include "tests/support/watchdog.h"

namespace zero::testing {

using Tensors = std::vector<std::vector<float>>;  // by ParameterId
using Element = std::function<float(ParameterId, std::size_t)>;

[[nodiscard]] inline ParameterId parameter(std::size_t p) {
  return static_cast<ParameterId>(p);
}
[[nodiscard]] inline UnitId unit(std::size_t u) {
  return static_cast<UnitId>(u);
}

// Every stage at worlds of 1 to 4 ranks, under a watchdog.
class StagesAndWorlds : public ::testing::TestWithParam<std::tuple<Stage, int>> {
 protected:
  [[nodiscard]] static Stage stage() { return std::get<0>(GetParam()); }
  [[nodiscard]] static int world() { return std::get<1>(GetParam()); }
  [[nodiscard]] static Options options() {
    Options out;
    out.stage = stage();
    out.deadline = scaled(std::chrono::seconds(15));
    return out;
  }

 private:
  Watchdog watchdog_{std::chrono::seconds(60)};
};

[[nodiscard]] inline auto every_stage() {
  return ::testing::Values(Stage::kReplicated, Stage::kStates, Stage::kGradients,
                           Stage::kParameters);
}
[[nodiscard]] inline auto every_case() {
  return ::testing::Combine(every_stage(), ::testing::Values(1, 2, 3, 4));
}
[[nodiscard]] inline std::string case_name(
    const ::testing::TestParamInfo<std::tuple<Stage, int>>& info) {
  return "Stage" + std::to_string(static_cast<int>(std::get<0>(info.param))) + "World" +
         std::to_string(std::get<1>(info.param));
}

// One rank with a device and an initialized optimizer of its own.
struct Rank {
  Rank(const ModelSpec& model, const Options& options, Communicator& communicator_in,
       const Fill& initial = initial_values)
      : communicator(communicator_in),
        device(make_cpu_backend()),
        optimizer(make_plan(model, options, {.shard_ranks = communicator_in.world()}), *device,
                  {communicator_in}) {
    optimizer.initialize(initial);
  }
  [[nodiscard]] int rank() const { return communicator.rank(); }
  [[nodiscard]] int world() const { return communicator.world(); }

  Communicator& communicator;
  std::unique_ptr<Ledger> device;
  Optimizer optimizer;
};

inline void run_each(int world, const ModelSpec& model, const Options& options,
                     const std::function<void(Rank&)>& body) {
  run_ranks(world, [&](Communicator& communicator) {
    Rank rank(model, options, communicator);
    body(rank);
  });
}

// How a rank's body ended: the type of what it threw and its message, or neither.
struct Ending {
  std::string kind, what;
};

// The rank leaves normally in each case: that the others learn of an error is the library's work.
[[nodiscard]] inline std::vector<Ending> endings(int world,
                                                 const std::function<void(Communicator&)>& body) {
  std::vector<Ending> out(static_cast<std::size_t>(world));
  run_ranks(world, [&](Communicator& communicator) {
    Ending& mine = out[static_cast<std::size_t>(communicator.rank())];
    try {
      body(communicator);
    } catch (const UsageError& e) {
      mine = {"UsageError", e.what()};
    } catch (const OutOfMemory& e) {
      mine = {"OutOfMemory", e.what()};
    } catch (const CommError& e) {
      mine = {"CommError", e.what()};
    } catch (const Error& e) {
      mine = {"Error", e.what()};
    } catch (const std::exception& e) {
      mine = {"std::exception", e.what()};
    }
  });
  return out;
}

// ---- a loop

[[nodiscard]] inline const GroupOptions& group_of(const ModelSpec& model, ParameterId p) {
  return model.groups()[index(model.parameters()[index(p)].group)].options;
}
[[nodiscard]] inline bool is_trained(const ModelSpec& model, ParameterId p) {
  return group_of(model, p).train == Train::kYes;
}

// Writes one parameter's whole gradient through a lease of its own, on the calling thread.
inline void write(Optimizer& optimizer, MicroBatch& micro, ParameterId p, const Element& value,
                  Write how = Write::kOverwrite) {
  const ModelSpec& model = optimizer.plan().model();
  const ModelSpec::Parameter& what = model.parameters()[index(p)];
  GradientLease lease = micro.gradients(what.unit, kHost);
  const bool keep = how == Write::kAdd;
  if (group_of(model, p).precision.gradient == DType::kBfloat16) {
    bf16* out = lease.data<bf16>(p, how);
    for (std::size_t i = 0; i < what.count; ++i) {
      out[i] = to_bf16((keep ? to_float(out[i]) : 0.0F) + value(p, i));
    }
  } else {
    float* out = lease.data<float>(p, how);
    for (std::size_t i = 0; i < what.count; ++i) {
      out[i] = (keep ? out[i] : 0.0F) + value(p, i);
    }
  }
}

using Uses = std::function<bool(ParameterId)>;

// A micro-batch's backward: units last to first. Parameters that `uses` denies are marked unused.
inline void run_backward(Optimizer& optimizer, MicroBatch& micro, const Element& gradient,
                         const Uses& uses = {}) {
  const ModelSpec& model = optimizer.plan().model();
  for (std::size_t u = model.units().size(); u-- > 0;) {
    for (std::size_t p = 0; p < model.parameters().size(); ++p) {
      if (model.parameters()[p].unit != unit(u) || !is_trained(model, parameter(p))) {
        continue;
      }
      if (uses && !uses(parameter(p))) {
        micro.mark_unused(parameter(p));
      } else {
        write(optimizer, micro, parameter(p), gradient);
      }
    }
    micro.ready(unit(u), kHost);
  }
}

inline void run_micro_batch(Optimizer& optimizer, const Element& gradient, Last last = Last::kYes,
                            const Uses& uses = {}) {
  MicroBatch micro = optimizer.begin_micro_batch({.last = last});
  run_backward(optimizer, micro, gradient, uses);
}

inline StepResult train_step(Optimizer& optimizer, const Element& gradient,
                             const StepOptions& options = {}) {
  run_micro_batch(optimizer, gradient);
  return optimizer.step(options).get();
}

// ---- what can be read

// A parameter's elements as this rank's layers see them. Collective at stage 3.
[[nodiscard]] inline std::vector<float> read(Optimizer& optimizer, ParameterId p) {
  const ModelSpec& model = optimizer.plan().model();
  const ModelSpec::Parameter& what = model.parameters()[index(p)];
  const ParameterLease lease = optimizer.parameters(what.unit, kHost);
  std::vector<float> out(what.count);
  for (std::size_t i = 0; i < what.count; ++i) {
    out[i] = group_of(model, p).precision.parameter == DType::kBfloat16
                 ? to_float(lease.data<bf16>(p)[i])
                 : lease.data<float>(p)[i];
  }
  return out;
}

[[nodiscard]] inline Tensors read_all(Optimizer& optimizer) {
  Tensors out;
  for (std::size_t p = 0; p < optimizer.plan().model().parameters().size(); ++p) {
    out.push_back(read(optimizer, parameter(p)));
  }
  return out;
}

// Puts together what `visit` shows on each rank; every rank gets the whole. Collective.
// Throws: std::logic_error when an element is shown twice, or a trained one nowhere
[[nodiscard]] inline Tensors gather_owned(const ModelSpec& model, Communicator& communicator,
                                          const std::function<void(const Visit&)>& visit) {
  struct Cell {
    float value = 0;
    std::uint32_t owners = 0;
  };
  std::vector<std::size_t> begin{0};
  for (const ModelSpec::Parameter& p : model.parameters()) {
    begin.push_back(begin.back() + p.count);
  }
  std::vector<Cell> mine(begin.back());
  visit([&](ParameterId p, std::uint64_t first, std::span<const float> values) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      Cell& cell = mine.at(begin[index(p)] + first + i);
      cell = {values[i], cell.owners + 1};
    }
  });
  const auto all = communicator.bootstrap().all_gather(std::as_bytes(std::span(mine)),
                                                       scaled(std::chrono::seconds(15)));
  Tensors out;
  for (std::size_t p = 0; p < model.parameters().size(); ++p) {
    std::vector<float>& values = out.emplace_back();
    for (std::size_t i = begin[p]; i < begin[p + 1]; ++i) {
      Cell sum;
      for (const auto& bytes : all) {
        Cell cell;
        std::memcpy(&cell, bytes.data() + i * sizeof(Cell), sizeof(Cell));
        sum = cell.owners > 0 ? Cell{cell.value, sum.owners + cell.owners} : sum;
      }
      const std::uint32_t least = is_trained(model, parameter(p)) ? 1 : 0;
      if (sum.owners > 1 || sum.owners < least) {
        throw std::logic_error(model.parameters()[p].name + " element " +
                               std::to_string(i - begin[p]) + " has " + std::to_string(sum.owners) +
                               " owners");
      }
      values.push_back(sum.value);
    }
  }
  return out;
}

[[nodiscard]] inline Tensors whole(Rank& rank, Values values) {
  return gather_owned(rank.optimizer.plan().model(), rank.communicator,
                      [&](const Visit& visit) { rank.optimizer.visit_own(values, visit); });
}
[[nodiscard]] inline Tensors whole_state(Rank& rank, const std::string& state) {
  return gather_owned(rank.optimizer.plan().model(), rank.communicator,
                      [&](const Visit& visit) { rank.optimizer.visit_own_state(state, visit); });
}

[[nodiscard]] inline std::vector<std::vector<std::uint32_t>> bits_of(const Tensors& tensors) {
  std::vector<std::vector<std::uint32_t>> out;
  for (const std::vector<float>& values : tensors) {
    std::vector<std::uint32_t>& bits = out.emplace_back();
    for (const float x : values) {
      bits.push_back(std::bit_cast<std::uint32_t>(x));
    }
  }
  return out;
}

// Every persistent bit of an optimizer over AdamW or Adam groups. Collective.
struct Snapshot {
  std::vector<std::vector<std::uint32_t>> parameters, master, exp_avg, exp_avg_sq;
  std::vector<std::int64_t> step_counts;
  std::uint64_t hash = 0;
  friend bool operator==(const Snapshot&, const Snapshot&) = default;
};
[[nodiscard]] inline Snapshot snapshot(Rank& rank) {
  Snapshot out{.parameters = bits_of(read_all(rank.optimizer)),
               .master = bits_of(whole(rank, Values::kMaster)),
               .exp_avg = bits_of(whole_state(rank, "exp_avg")),
               .exp_avg_sq = bits_of(whole_state(rank, "exp_avg_sq")),
               .step_counts = {},
               .hash = rank.optimizer.state_hash()};
  for (std::size_t p = 0; p < rank.optimizer.plan().model().parameters().size(); ++p) {
    out.step_counts.push_back(rank.optimizer.step_count(parameter(p)));
  }
  return out;
}

// ---- right values

// One element under Adam or AdamW in double: Kingma and Ba 2015, Loshchilov and Hutter 2019.
struct AdamElement {
  double w = 0, m = 0, v = 0;
  std::int64_t t = 0;

  void step(double g, const Hyper& h) {
    ++t;
    w *= 1 - h.lr * h.weight_decay;
    m = h.beta1 * m + (1 - h.beta1) * g;
    v = h.beta2 * v + (1 - h.beta2) * g * g;
    const double correction1 = 1 - std::pow(h.beta1, static_cast<double>(t));
    const double correction2 = 1 - std::pow(h.beta2, static_cast<double>(t));
    w -= h.lr * (m / correction1) / (std::sqrt(v / correction2) + h.eps);
  }
};

}  // namespace zero::testing
