#include "engine/engine.h"

#include <cstring>
#include <optional>

#include "zero/error.h"

#include "core/plan_check.h"
#include "engine/same_plan.h"

namespace zero {
namespace {

const Plan& checked(const Plan& plan, Communicator& ranks) {
  const std::string who = "rank " + std::to_string(ranks.rank()) + ": ";
  require(plan.world().shard_ranks == ranks.world(),
          who + "the plan is for " + std::to_string(plan.world().shard_ranks) +
              " ranks, but the communicator has " + std::to_string(ranks.world()));
  require(plan.world().transport == ranks.transport(),
          who + "the plan is for another transport than the communicator's: set World::transport");
  require_same_plan(plan, ranks.bootstrap());
  return plan;
}

}  // namespace

Engine::Engine(const Plan& plan, Backend& device, Communicators ranks) try
    : context_(checked(plan, ranks.shard), device, ranks.shard),
      arrays_(context_),
      gather_(context_, arrays_),
      reducer_(context_, arrays_),
      micro_batches_(context_, arrays_, reducer_),
      stepper_(context_, {arrays_, gather_, micro_batches_, reducer_}),
      values_(context_, arrays_, gather_) {
  agree("construction");  // a rank without memory is known to all before the first collective
} catch (const std::exception& error) {
  ranks.shard.bootstrap().raise(error.what());
}

void Engine::agree(const char* on) {
  (void)context_.ranks.bootstrap().all_gather(std::as_bytes(std::span(on, std::strlen(on))),
                                              context_.plan.options().deadline);
}

void Engine::require_idle(const char* verb) const {
  micro_batches_.require_no_lease();
  require(micro_batches_.open_count() == 0,
          context_.who() + verb + " while a micro-batch is open: make its units ready first");
  if (const std::optional<UnitId> open = gather_.open_unit()) {
    throw UsageError(context_.who() + verb + " while a parameter lease of unit '" +
                     context_.name(*open) + "' is open: end it first");
  }
}

void Engine::require_initialized(const char* verb) const {
  require(initialized_,
          context_.who() + verb + " before initialize(): parameters have no values yet");
}

void Engine::overwrite(const Fill& fill, const char* verb) {
  values_.overwrite(fill);
  if (context_.parameters_sharded()) {
    meet(verb);  // at other stages the ranks meet where they refresh replicas
  }
}

void Engine::initialize(const Fill& fill) {
  context_.guarded([&] {
    require_idle("initialize()");
    require(micro_batches_.begun() == 0,
            context_.who() + "initialize() in the middle of a step: call abandon_step() first");
    arrays_.reset_states();
    overwrite(fill, "initialize()");
    initialized_ = true;
    gradients_valid_ = false;
  });
}

void Engine::overwrite_own(const Fill& fill) {
  context_.guarded([&] {
    require_idle("overwrite_own()");
    require_initialized("overwrite_own()");
    overwrite(fill, "overwrite_own()");
  });
}

ParameterLease Engine::parameters(UnitId unit, StreamRef stream) {
  return context_.guarded([&] {
    require_initialized("parameters()");
    gather_.open(unit, stream);
    return ParameterLease(*this, unit, stream);
  });
}

MicroBatch Engine::begin_micro_batch(MicroBatchOptions options) {
  return context_.guarded([&] {
    require_initialized("begin_micro_batch()");
    const bool first_open = micro_batches_.open_count() == 0;
    const std::uint64_t id = micro_batches_.begin(options.last == Last::kYes);
    stepper_.mark_begin();
    gradients_valid_ = false;
    if (first_open) {
      gather_.begin_pass(Pass::kBackward);
    }
    return MicroBatch(*this, id);
  });
}

PendingStep Engine::step(const StepOptions& options) {
  return context_.guarded([&] {
    require_initialized("step()");
    micro_batches_.require_complete();
    require_idle("step()");
    PendingStep pending(stepper_.enqueue(options));
    gradients_valid_ = true;
    return pending;
  });
}

// A collective without data, on the path of the others: a rank that calls something else is found.
void Engine::meet(const char* what) {
  context_.device.fill(arrays_.control(), 0, sizeof(std::int64_t), context_.stream);
  const Transfer nothing{arrays_.control(), arrays_.control(), 1, DType::kInt64};
  context_.all_reduce(std::span(&nothing, 1),
                      std::string(what) + " of step " + std::to_string(context_.statistics.steps));
}

void Engine::abandon_step() {
  context_.guarded([&] {
    micro_batches_.require_no_lease();
    micro_batches_.abandon();
    meet("abandon");
    context_.finish();
    gather_.begin_pass(Pass::kForward);
  });
}

const Hyper& Engine::hyper(GroupId group) const {
  require(index(group) < context_.model().groups().size(),
          context_.who() + "hyper() of a group that is not in the model");
  return stepper_.hyper(group);
}

void Engine::set(GroupId group, const Hyper& h) {
  require(index(group) < context_.model().groups().size(),
          context_.who() + "set() of a group that is not in the model");
  check_hyper(
      context_.who() + "set() of group '" + context_.model().groups()[index(group)].name + "'", h);
  stepper_.set(group, h);
}

void Engine::visit_own(Values values, const Visit& visit) {
  context_.check();
  require_initialized("visit_own()");
  require(values != Values::kGradients || gradients_valid_,
          context_.who() + "visit of gradients outside of step() to begin_micro_batch()");
  values_.visit_own(values, visit);
}

void Engine::visit_own_state(const std::string& state, const Visit& visit) {
  context_.check();
  require_initialized("visit_own_state()");
  values_.visit_own_state(state, visit);
}

void Engine::visit_all(Values values, const Visit& visit, int root) {
  context_.guarded([&] {
    require_initialized("visit_all()");
    require_idle("visit_all()");
    require(values != Values::kGradients || gradients_valid_,
            context_.who() + "visit of gradients outside of step() to begin_micro_batch()");
    values_.visit_all(values, visit, root);
  });
}

std::int64_t Engine::step_count(ParameterId parameter) {
  context_.check();
  return values_.step_count(parameter);
}

std::uint64_t Engine::state_hash() {
  return context_.guarded([&] {
    require_initialized("state_hash()");
    return values_.state_hash();
  });
}

void Engine::used_on(UnitId unit, StreamRef stream) {
  context_.guarded([&] { gather_.used_on(unit, stream); });
}

void Engine::close_parameters(UnitId unit, StreamRef stream) noexcept {
  try {
    gather_.close(unit, stream);
  } catch (...) {
    context_.poison(std::current_exception());
  }
}

GradientLease Engine::gradients(std::uint64_t micro, UnitId unit, StreamRef stream) {
  return context_.guarded([&] {
    micro_batches_.open_lease(micro, unit, stream);
    return GradientLease(*this, micro, unit, stream);
  });
}

void Engine::close_gradients(std::uint64_t micro, UnitId unit, StreamRef stream) noexcept {
  try {
    micro_batches_.close_lease(micro, unit, stream);
  } catch (...) {
    context_.poison(std::current_exception());
  }
}

void Engine::add_gradient(std::uint64_t micro, ParameterId p, const void* from, DType dtype,
                          StreamRef stream) {
  context_.guarded([&] { micro_batches_.add(micro, p, from, dtype, stream); });
}

void Engine::ready(std::uint64_t micro, UnitId unit, StreamRef stream) {
  context_.guarded([&] {
    const bool complete = micro_batches_.ready(micro, unit, stream);
    if (complete && micro_batches_.open_count() == 0) {
      gather_.begin_pass(Pass::kForward);
    }
  });
}

void Engine::mark_unused(std::uint64_t micro, ParameterId p) {
  context_.guarded([&] { micro_batches_.mark_unused(micro, p); });
}

void Engine::abandon(std::uint64_t micro) {
  context_.guarded([&] {
    require(micro_batches_.is_open(micro),
            context_.who() + "abandon() of a micro-batch that is not open");
  });
  abandon_step();
}

void Engine::drop(std::uint64_t micro) noexcept {
  if (!context_.poisoned() && micro_batches_.is_open(micro)) {
    try {
      throw UsageError(context_.who() + "a micro-batch was destroyed before unit '" +
                       context_.name(micro_batches_.missing_unit(micro)) +
                       "' was ready (by an exception?): make it ready, or call abandon()");
    } catch (...) {
      context_.poison(std::current_exception());
    }
  }
}

}  // namespace zero
