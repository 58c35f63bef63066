// The engine behind Optimizer: one code path for all stages; the stage is data in the plan.
#pragma once

#include <cstdint>
#include <string>

#include "zero/optimizer.h"

#include "engine/arrays.h"
#include "engine/context.h"
#include "engine/gather.h"
#include "engine/micro_batches.h"
#include "engine/reducer.h"
#include "engine/step.h"
#include "engine/values.h"

namespace zero {

// Used by one host thread. Every call but those marked local passes through Context::guarded.
class Engine {
 public:
  Engine(const Plan& plan, Backend& device, Communicators ranks);

  void initialize(const Fill& fill);
  [[nodiscard]] ParameterLease parameters(UnitId unit, StreamRef stream);
  [[nodiscard]] MicroBatch begin_micro_batch(MicroBatchOptions options);
  PendingStep step(const StepOptions& options);
  void abandon_step();
  [[nodiscard]] const Hyper& hyper(GroupId group) const;
  void set(GroupId group, const Hyper& hyper);
  void visit_own(Values values, const Visit& visit);
  void visit_own_state(const std::string& state, const Visit& visit);
  void overwrite_own(const Fill& fill);
  void visit_all(Values values, const Visit& visit, int root);
  [[nodiscard]] std::int64_t step_count(ParameterId parameter);
  [[nodiscard]] std::uint64_t state_hash();
  [[nodiscard]] const Plan& plan() const { return context_.plan; }
  [[nodiscard]] const Statistics& statistics() const { return context_.statistics; }

  // ---- for the leases
  void used_on(UnitId unit, StreamRef stream);
  void close_parameters(UnitId unit, StreamRef stream) noexcept;
  [[nodiscard]] const void* parameter_data(UnitId unit, ParameterId p, DType dtype) const {
    return gather_.data(unit, p, dtype);
  }
  [[nodiscard]] GradientLease gradients(std::uint64_t micro, UnitId unit, StreamRef stream);
  void close_gradients(std::uint64_t micro, UnitId unit, StreamRef stream) noexcept;
  [[nodiscard]] MicroBatches& micro_batches() { return micro_batches_; }
  void add_gradient(std::uint64_t micro, ParameterId p, const void* from, DType dtype,
                    StreamRef stream);
  void ready(std::uint64_t micro, UnitId unit, StreamRef stream);
  void mark_unused(std::uint64_t micro, ParameterId p);
  void abandon(std::uint64_t micro);
  void drop(std::uint64_t micro) noexcept;

 private:
  void require_idle(const char* verb) const;
  void require_initialized(const char* verb) const;
  void agree(const char* on);
  void meet(const char* what);
  void overwrite(const Fill& fill, const char* verb);

  Context context_;
  Arrays arrays_;
  Gather gather_;
  Reducer reducer_;
  MicroBatches micro_batches_;
  Stepper stepper_;  // its destructor finishes the engine stream, before any memory goes
  ValueAccess values_;
  bool initialized_ = false;
  bool gradients_valid_ = false;  // from step() to the next begin_micro_batch()
};

}  // namespace zero
