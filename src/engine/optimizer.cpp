// The facade: leases and handles that forward to the engine.
#include "zero/optimizer.h"

#include <limits>
#include <string>
#include <utility>

#include "zero/error.h"

#include "engine/engine.h"

namespace zero {
namespace {

Engine& alive(Engine* engine, const char* what) {
  require(engine != nullptr,
          std::string("use of ") + what + " that was moved from: use what it was moved to");
  return *engine;
}

}  // namespace

ParameterLease::ParameterLease(Engine& engine, UnitId unit, StreamRef stream)
    : engine_(&engine), unit_(unit), stream_(stream) {}
ParameterLease::ParameterLease(ParameterLease&& other) noexcept
    : engine_(std::exchange(other.engine_, nullptr)), unit_(other.unit_), stream_(other.stream_) {}
ParameterLease::~ParameterLease() {
  if (engine_ != nullptr) {
    engine_->close_parameters(unit_, stream_);
  }
}
void ParameterLease::used_on(StreamRef stream) {
  alive(engine_, "a ParameterLease").used_on(unit_, stream);
}
const void* ParameterLease::raw(ParameterId p, DType dtype) const {
  return alive(engine_, "a ParameterLease").parameter_data(unit_, p, dtype);
}

GradientLease::GradientLease(Engine& engine, std::uint64_t micro, UnitId unit, StreamRef stream)
    : engine_(&engine), micro_(micro), unit_(unit), stream_(stream) {}
GradientLease::GradientLease(GradientLease&& other) noexcept
    : engine_(std::exchange(other.engine_, nullptr)),
      micro_(other.micro_),
      unit_(other.unit_),
      stream_(other.stream_) {}
GradientLease::~GradientLease() {
  if (engine_ != nullptr) {
    engine_->close_gradients(micro_, unit_, stream_);
  }
}
void* GradientLease::raw(ParameterId p, DType dtype, Write write) {
  return alive(engine_, "a GradientLease")
      .micro_batches()
      .data(micro_, p, dtype, write, unit_, stream_);
}

MicroBatch::MicroBatch(MicroBatch&& other) noexcept
    : engine_(std::exchange(other.engine_, nullptr)), micro_(other.micro_) {}
MicroBatch::~MicroBatch() {
  if (engine_ != nullptr) {
    engine_->drop(micro_);
  }
}
GradientLease MicroBatch::gradients(UnitId unit, StreamRef stream) {
  return alive(engine_, "a MicroBatch").gradients(micro_, unit, stream);
}
void MicroBatch::add_gradient(ParameterId p, const void* from, DType dtype, StreamRef stream) {
  alive(engine_, "a MicroBatch").add_gradient(micro_, p, from, dtype, stream);
}
void MicroBatch::ready(UnitId unit, StreamRef stream) {
  alive(engine_, "a MicroBatch").ready(micro_, unit, stream);
}
void MicroBatch::mark_unused(ParameterId p) {
  alive(engine_, "a MicroBatch").mark_unused(micro_, p);
}
void MicroBatch::abandon() {
  alive(engine_, "a MicroBatch").abandon(micro_);
}

PendingStep::PendingStep(std::shared_ptr<StepState> state) : state_(std::move(state)) {}
PendingStep::PendingStep(PendingStep&&) noexcept = default;
PendingStep& PendingStep::operator=(PendingStep&&) noexcept = default;
PendingStep::~PendingStep() = default;

bool PendingStep::done() const {
  require(state_ != nullptr, "done() of a PendingStep that was moved from");
  return state_->context == nullptr || state_->context->device.done(state_->event);
}

StepResult PendingStep::get() {
  require(state_ != nullptr, "get() of a PendingStep that was moved from");
  if (state_->context != nullptr) {
    state_->context->finish(state_->event);
  }
  if (!state_->filled && state_->error != nullptr) {
    std::rethrow_exception(state_->error);
  }
  require(state_->filled, "get() of a step that never ran");
  const StepScalars& s = state_->scalars;
  StepResult result;
  result.applied = s.skip == 0;
  result.grad_norm = result.applied ? s.grad_norm : std::numeric_limits<double>::quiet_NaN();
  if (s.first_non_finite >= 0) {
    result.first_non_finite = static_cast<ParameterId>(s.first_non_finite);
  }
  result.owner = static_cast<int>(s.owner);
  result.step_ms = std::chrono::duration<double, std::milli>(state_->end - state_->begin).count();
  result.wire_bytes = state_->wire_bytes;
  return result;
}

Optimizer::Optimizer(const Plan& plan, Backend& device, Communicators ranks)
    : engine_(std::make_unique<Engine>(plan, device, ranks)) {}
Optimizer::Optimizer(Optimizer&&) noexcept = default;
Optimizer::~Optimizer() = default;
void Optimizer::initialize(const Fill& fill) {
  alive(engine_.get(), "an Optimizer").initialize(fill);
}
ParameterLease Optimizer::parameters(UnitId unit, StreamRef stream) {
  return alive(engine_.get(), "an Optimizer").parameters(unit, stream);
}
MicroBatch Optimizer::begin_micro_batch(MicroBatchOptions options) {
  return alive(engine_.get(), "an Optimizer").begin_micro_batch(options);
}
PendingStep Optimizer::step(const StepOptions& options) {
  return alive(engine_.get(), "an Optimizer").step(options);
}
void Optimizer::abandon_step() {
  alive(engine_.get(), "an Optimizer").abandon_step();
}
Hyper Optimizer::hyper(GroupId group) const {
  return alive(engine_.get(), "an Optimizer").hyper(group);
}
void Optimizer::set(GroupId group, const Hyper& hyper) {
  alive(engine_.get(), "an Optimizer").set(group, hyper);
}
void Optimizer::visit_own(Values values, const Visit& visit) const {
  alive(engine_.get(), "an Optimizer").visit_own(values, visit);
}
void Optimizer::overwrite_own(const Fill& fill) {
  alive(engine_.get(), "an Optimizer").overwrite_own(fill);
}
void Optimizer::visit_own_state(const std::string& state, const Visit& visit) const {
  alive(engine_.get(), "an Optimizer").visit_own_state(state, visit);
}
void Optimizer::visit_all(Values values, const Visit& visit, int root) const {
  alive(engine_.get(), "an Optimizer").visit_all(values, visit, root);
}
std::int64_t Optimizer::step_count(ParameterId p) const {
  return alive(engine_.get(), "an Optimizer").step_count(p);
}
std::uint64_t Optimizer::state_hash() const {
  return alive(engine_.get(), "an Optimizer").state_hash();
}
const Plan& Optimizer::plan() const {
  return alive(engine_.get(), "an Optimizer").plan();
}
Statistics Optimizer::statistics() const {
  return alive(engine_.get(), "an Optimizer").statistics();
}

}  // namespace zero
