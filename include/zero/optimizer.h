// The optimizer that a training loop holds: leases, micro-batches and steps at every stage.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "zero/backend.h"
#include "zero/communicator.h"
#include "zero/plan.h"

namespace zero {

class Engine;      // src/engine/engine.h
struct StepState;  // src/engine/step.h

// The gathered parameters of one unit, to be read on the lease's stream until it is destroyed.
class ParameterLease {
 public:
  ParameterLease(ParameterLease&&) noexcept;
  ParameterLease& operator=(ParameterLease&&) = delete;
  ~ParameterLease();

  // Row-major elements of a parameter of the unit. A parameter of 0 elements may be null.
  // Throws: UsageError for another unit's parameter or another dtype
  template <class T>
  [[nodiscard]] const T* data(ParameterId p) const {
    return static_cast<const T*>(raw(p, dtype_of<T>::value));
  }
  // Says that work enqueued on another stream, so far, reads the lease too.
  void used_on(StreamRef);

 private:
  friend class Engine;
  ParameterLease(Engine& engine, UnitId unit, StreamRef stream);
  [[nodiscard]] const void* raw(ParameterId, DType) const;

  Engine* engine_;
  UnitId unit_;
  StreamRef stream_;
};

enum class Write : std::uint8_t {
  kAdd,        // the memory holds the gradient so far: zero at the micro-batch's first lease
  kOverwrite,  // the caller promises to write all of it
};

// The gradient of one unit in one micro-batch, to be written on the lease's stream.
class GradientLease {
 public:
  GradientLease(GradientLease&&) noexcept;
  GradientLease& operator=(GradientLease&&) = delete;
  ~GradientLease();

  // Throws: UsageError for another unit's, a frozen or an unused parameter, or another dtype
  template <class T>
  [[nodiscard]] T* data(ParameterId p, Write write = Write::kAdd) {
    return static_cast<T*>(raw(p, dtype_of<T>::value, write));
  }

 private:
  friend class Engine;
  GradientLease(Engine& engine, std::uint64_t micro, UnitId unit, StreamRef stream);
  [[nodiscard]] void* raw(ParameterId, DType, Write);

  Engine* engine_;
  std::uint64_t micro_;
  UnitId unit_;
  StreamRef stream_;
};

enum class Last : std::uint8_t { kNo, kYes };

struct MicroBatchOptions {
  // kYes lets stages 0 and 1 reduce during this backward; forgotten, it is correct and slower.
  Last last = Last::kNo;
};

// One backward pass. Destroyed before every trained unit is ready, it poisons the optimizer.
class MicroBatch {
 public:
  MicroBatch(MicroBatch&&) noexcept;
  MicroBatch& operator=(MicroBatch&&) = delete;
  ~MicroBatch();

  // Gathers nothing. Again and again for tied units and recomputation: the same memory. Leases of a
  // unit that are open at the same time are on one stream, or a UsageError; the end of a lease
  // orders streams.
  [[nodiscard]] GradientLease gradients(UnitId, StreamRef);
  // Adds a gradient that lies in the user's own memory, ready on `stream`; one pass.
  void add_gradient(ParameterId, const void* from, DType, StreamRef);
  // Once a unit, after the last contribution. Units are summed in this order on all ranks.
  // Throws: UsageError when a parameter of the unit has neither a gradient nor mark_unused
  void ready(UnitId, StreamRef);
  // The parameter took no part on this rank: zero here; no update if it is so on all ranks.
  void mark_unused(ParameterId);
  // Optimizer::abandon_step through the micro-batch.
  void abandon();

 private:
  friend class Engine;
  MicroBatch(Engine& engine, std::uint64_t micro) : engine_(&engine), micro_(micro) {}

  Engine* engine_;
  std::uint64_t micro_;
};

struct StepOptions {
  // Given on all ranks or on none: gradients are sums over tokens, divided by the sum of these.
  std::optional<std::uint64_t> local_tokens{};
  // In place of Options::clip_norm, for this step; infinity: no clipping.
  std::optional<double> clip_norm{};
  double lr_scale = 1;
};

struct StepResult {
  bool applied = false;  // false: a gradient was not finite; no bit of state changed
  double grad_norm = 0;  // of the averaged gradient before clipping; NaN when skipped
  std::optional<ParameterId> first_non_finite{};
  int owner = -1;                // the rank whose shard holds it: the sum is looked at, so this
                                 // does not say which rank's gradient was bad
  double step_ms = 0;            // from the first micro-batch to the end of the update
  std::uint64_t wire_bytes = 0;  // sent by this rank since the step before
};

// A step that was enqueued. May be dropped; outlives the optimizer.
class PendingStep {
 public:
  PendingStep(PendingStep&&) noexcept;
  PendingStep& operator=(PendingStep&&) noexcept;
  ~PendingStep();
  [[nodiscard]] bool done() const;
  // Waits. Throws: the error that stopped the step
  [[nodiscard]] StepResult get();

 private:
  friend class Engine;
  explicit PendingStep(std::shared_ptr<StepState> state);
  std::shared_ptr<StepState> state_;
};

enum class Values : std::uint8_t {
  kParameters,
  kMaster,     // the fp32 truth: the master weights, or the parameters where these are fp32
  kGradients,  // from step to the next begin_micro_batch: divided, unclipped
};
using Visit = std::function<void(ParameterId, std::uint64_t first, std::span<const float>)>;
using Fill = std::function<void(ParameterId, std::uint64_t first, std::span<float>)>;

// Counts since construction; cheap to read at any time.
struct Statistics {
  std::uint64_t steps = 0;            // enqueued
  std::uint64_t gathers = 0;          // grouped all-gathers of units
  std::uint64_t prefetches = 0;       // gathers that were enqueued ahead of their lease
  std::uint64_t prefetch_hits = 0;    // leases that found theirs under way
  std::uint64_t order_changes = 0;    // leases that the recorded order did not foresee
  std::uint64_t reductions = 0;       // grouped reduce-scatters
  std::uint64_t late_reductions = 0;  // of those, enqueued by step() for want of `last`
  std::uint64_t wire_bytes = 0;       // sent by this rank
};

// One optimizer over one model. Every method but those marked local is called by all ranks of the
// communicator, in the same order. After an error each call throws it again. Leases and
// micro-batches end before the optimizer that gave them; it may be moved while they are open.
// Backend and communicator outlive it.
class Optimizer {
 public:
  // Allocates everything that it will ever allocate.
  // Throws: UsageError when the ranks' plans differ, or plan and communicator do not match;
  //         OutOfMemory
  Optimizer(const Plan&, Backend&, Communicators);
  Optimizer(Optimizer&&) noexcept;
  Optimizer& operator=(Optimizer&&) = delete;
  ~Optimizer();

  // Sets every parameter from `fill`, which is asked only for the extents that this rank owns, in
  // fp32; states and step counts become zero.
  void initialize(const Fill& fill);

  // Legal at any time outside step, any number of times. At stage 3 it gathers.
  // Throws: UsageError when the unit's slot is in use by another unit's open lease
  [[nodiscard]] ParameterLease parameters(UnitId, StreamRef);
  [[nodiscard]] MicroBatch begin_micro_batch(MicroBatchOptions = {});
  // Enqueues the update and returns. Throws: UsageError when a unit is not ready or a lease open
  PendingStep step(const StepOptions& = {});
  // Drops every gradient since the last step; parameters, states and counts keep their bits.
  void abandon_step();

  [[nodiscard]] Hyper hyper(GroupId) const;  // local
  // From the next step on; equal on all ranks (checked at the step). Replaces the whole Hyper.
  void set(GroupId, const Hyper&);  // local

  void visit_own(Values, const Visit&) const;  // local: the extents of this rank
  // Writes the owned extents (masters and parameters; states stay) and refreshes all replicas.
  void overwrite_own(const Fill&);
  // An optimizer state by name over the owned extents. Throws: UsageError for an unknown name
  void visit_own_state(const std::string& state, const Visit&) const;  // local
  // Calls `visit` on rank `root` for the whole model, one unit at a time, with no micro-batch open.
  void visit_all(Values, const Visit& visit, int root = 0) const;
  [[nodiscard]] std::int64_t step_count(ParameterId) const;  // local: updates applied
  // The digest of all parameters, masters and states: independent of W, stage and sharding.
  [[nodiscard]] std::uint64_t state_hash() const;

  [[nodiscard]] const Plan& plan() const;       // local
  [[nodiscard]] Statistics statistics() const;  // local

 private:
  std::unique_ptr<Engine> engine_;
};

}  // namespace zero
