// One rank of a training run driven call by call, for tests that look between the calls.
#pragma once

#include <cstddef>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "zero/zero.h"

#include "tests/support/harness.h"
#include "tests/support/models.h"
#include "tests/support/watchdog.h"

namespace zero::testing {

class Trainer {
 public:
  Trainer(const ModelSpec& model, const Options& options, Communicator& ranks,
          std::unique_ptr<Backend> device = make_cpu_backend())
      : ranks_(ranks),
        device_(std::move(device)),
        optimizer_(make_plan(model, options, {.shard_ranks = ranks.world()}), *device_, {ranks}) {
    optimizer_.initialize(initial_values);
  }

  [[nodiscard]] Optimizer& optimizer() { return optimizer_; }
  [[nodiscard]] Backend& device() { return *device_; }
  [[nodiscard]] Communicator& ranks() { return ranks_; }
  [[nodiscard]] const ModelSpec& model() const { return optimizer_.plan().model(); }
  [[nodiscard]] std::vector<UnitId> units() const {
    std::vector<UnitId> out;
    for (std::uint32_t u = 0; u < model().units().size(); ++u) {
      out.push_back(UnitId{u});
    }
    return out;
  }

  // Leases each unit for a moment, in this order.
  void visit(std::span<const UnitId> order) {
    for (const UnitId unit : order) {
      (void)optimizer_.parameters(unit, kHost);
    }
  }
  void forward() { visit(units()); }

  // A whole backward in reverse order of units, every trained parameter written by `gradient`.
  void backward(const GradientAt& at, const Gradient& gradient, Last last = Last::kYes) {
    MicroBatch micro = optimizer_.begin_micro_batch({.last = last});
    const std::vector<UnitId> order = units();
    for (auto unit = order.rbegin(); unit != order.rend(); ++unit) {
      (void)optimizer_.parameters(*unit, kHost);
      write(micro, *unit, at, gradient);
    }
  }

  void write(MicroBatch& micro, UnitId unit, GradientAt at, const Gradient& gradient) {
    bool trained = false;
    for (std::uint32_t p = 0; p < model().parameters().size(); ++p) {
      const ModelSpec::Parameter& parameter = model().parameters()[p];
      const GroupOptions& group = model().groups()[index(parameter.group)].options;
      if (parameter.unit != unit || group.train == Train::kFrozen) {
        continue;
      }
      trained = trained || parameter.count > 0;
      at.parameter = ParameterId{p};
      std::vector<float> values(parameter.count);
      gradient(at, values);
      micro.add_gradient(ParameterId{p}, values.data(), DType::kFloat32, kHost);
    }
    if (trained) {
      micro.ready(unit, kHost);
    }
  }

  StepResult step(const StepOptions& options = {}) { return optimizer_.step(options).get(); }

  // All bits that this rank holds and that may only change by an applied step: own parameters,
  // masters, states and counts, and all parameters as a lease shows them. Collective at stage 3.
  [[nodiscard]] std::string snapshot() {
    std::string bits;
    const Visit keep = [&](ParameterId p, std::uint64_t first, std::span<const float> values) {
      append(bits, &p, sizeof p);
      append(bits, &first, sizeof first);
      append(bits, values.data(), values.size_bytes());
    };
    optimizer_.visit_own(Values::kParameters, keep);
    optimizer_.visit_own(Values::kMaster, keep);
    optimizer_.visit_own_state("exp_avg", keep);
    optimizer_.visit_own_state("exp_avg_sq", keep);
    for (std::uint32_t p = 0; p < model().parameters().size(); ++p) {
      const std::int64_t count = optimizer_.step_count(ParameterId{p});
      append(bits, &count, sizeof count);
    }
    for (const UnitId unit : units()) {
      append_unit(bits, unit);
    }
    return bits;
  }

 private:
  static void append(std::string& bits, const void* data, std::size_t bytes) {
    bits.append(static_cast<const char*>(data), bytes);
  }
  void append_unit(std::string& bits, UnitId unit) {
    const ParameterLease lease = optimizer_.parameters(unit, kHost);
    for (std::uint32_t p = 0; p < model().parameters().size(); ++p) {
      const ModelSpec::Parameter& parameter = model().parameters()[p];
      const DType dtype = model().groups()[index(parameter.group)].options.precision.parameter;
      if (parameter.unit == unit && parameter.count > 0) {
        const void* data = dtype == DType::kFloat32
                               ? static_cast<const void*>(lease.data<float>(ParameterId{p}))
                               : static_cast<const void*>(lease.data<bf16>(ParameterId{p}));
        append(bits, data, parameter.count * bytes_of(dtype));
      }
    }
  }

  Communicator& ranks_;
  std::unique_ptr<Backend> device_;
  Optimizer optimizer_;
};

// Runs `body(trainer)` on every rank. Its expectations are gathered as those of one test.
template <class Body>
void train(const ModelSpec& model, const Options& options, int world, Body&& body) {
  const Watchdog watchdog(std::chrono::seconds(100));
  run_ranks(world, [&](Communicator& ranks) {
    SCOPED_TRACE("rank " + std::to_string(ranks.rank()) + " of " + std::to_string(world) +
                 ", stage " + std::to_string(static_cast<int>(options.stage)));
    Trainer trainer(model, options, ranks);
    body(trainer);
  });
}

}  // namespace zero::testing
