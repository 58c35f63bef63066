#include "engine/step.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "zero/error.h"

#include "engine/groups.h"

namespace zero {
namespace {

// A mark of the step's choices, for the label that ranks compare; exact text would be long.
std::uint64_t mix(std::uint64_t hash, double value) {
  hash ^= std::bit_cast<std::uint64_t>(value);
  hash *= 0x9e3779b97f4a7c15ULL;
  return hash ^ (hash >> 29);
}

std::uint64_t hash_of(const std::vector<Hyper>& groups) {
  std::uint64_t hash = 0;
  for (const Hyper& h : groups) {
    for (const double value : {h.lr, h.weight_decay, h.beta1, h.beta2, h.eps, h.momentum, h.user[0],
                               h.user[1], h.user[2], h.user[3]}) {
      hash = mix(hash, value);
    }
  }
  return hash;
}

}  // namespace

Stepper::Stepper(Context& context, Parts parts) : context_(context), parts_(parts) {
  for (const ModelSpec::Group& group : context.model().groups()) {
    hypers_.push_back(group.options.hyper);
  }
  const std::size_t bytes = parts.arrays.control_words() * sizeof(std::int64_t) +
                            sizeof(StepInputs) + hypers_.size() * sizeof(Hyper);
  staging_ = context.device.allocate_host({bytes, Category::kScratch});
  result_ = context.device.allocate_host({sizeof(StepScalars), Category::kScratch});
}

Stepper::~Stepper() {
  std::exception_ptr error;
  try {
    context_.finish();
  } catch (...) {
    error = std::current_exception();
  }
  for (const auto& weak : outstanding_) {
    if (const auto state = weak.lock()) {
      state->context = nullptr;
      state->error = error;
    }
  }
}

void Stepper::mark_begin() {
  if (!begun_) {
    begun_ = true;
    begin_ = std::chrono::steady_clock::now();
  }
}

std::shared_ptr<StepState> Stepper::enqueue(const StepOptions& options) {
  Message m = message(options);
  const std::string what = label(m);
  parts_.reducer.finish(parts_.micro_batches.begun());
  send(std::move(m));
  measure_and_update(what);
  refresh_replicas();
  parts_.gather.invalidate();
  parts_.micro_batches.reset();
  ++context_.statistics.steps;
  return enqueue_result();
}

Stepper::Message Stepper::message(const StepOptions& options) const {
  const double clip = options.clip_norm.value_or(
      context_.plan.options().clip_norm.value_or(std::numeric_limits<double>::infinity()));
  require(clip > 0, context_.who() + "step() with clip_norm " + std::to_string(clip) +
                        ": expected a norm > 0 (infinity: no clipping in this step)");
  require(std::isfinite(options.lr_scale) && options.lr_scale >= 0,
          context_.who() + "step() with lr_scale " + std::to_string(options.lr_scale) +
              ": expected a finite number >= 0");
  Message m{.control = std::vector<std::int64_t>(parts_.arrays.control_words()),
            .inputs = {.clip_norm = clip,
                       .lr_scale = options.lr_scale,
                       .micro_batches = parts_.micro_batches.begun(),
                       .tokens_given = options.local_tokens.has_value() ? 1 : 0},
            .groups = hypers_};
  const std::uint64_t tokens = options.local_tokens.value_or(0);
  require(
      tokens < (1ULL << 40),
      context_.who() + "step() with local_tokens of 2^40 or more: their sum would not be exact");
  m.control[ControlLayout::kTokens] = static_cast<std::int64_t>(tokens);
  const std::size_t used_at = ControlLayout::used_at(static_cast<std::size_t>(context_.world));
  const std::vector<std::uint8_t>& used = parts_.micro_batches.used();
  for (std::size_t p = 0; p < used.size(); ++p) {
    m.control[used_at + p / ControlLayout::kLanes] |=
        static_cast<std::int64_t>(used[p])
        << (ControlLayout::kLaneBits * (p % ControlLayout::kLanes));
  }
  return m;
}

std::string Stepper::label(const Message& m) const {
  return "step " + std::to_string(context_.statistics.steps) + " after " +
         std::to_string(m.inputs.micro_batches) + " micro-batches, tokens " +
         (m.inputs.tokens_given != 0 ? "given" : "not given") + ", clip_norm " +
         std::to_string(m.inputs.clip_norm) + ", lr_scale " + std::to_string(m.inputs.lr_scale) +
         ", hyper-parameters #" +
         std::to_string(mix(mix(hash_of(m.groups), m.inputs.lr_scale), m.inputs.clip_norm));
}

void Stepper::send(Message m) {
  const std::size_t control = m.control.size() * sizeof(std::int64_t);
  const std::size_t groups = m.groups.size() * sizeof(Hyper);
  auto* to = staging_.as<std::byte>();
  context_.device.call(context_.stream, [to, control, groups, message = std::move(m)] {
    std::memcpy(to, message.control.data(), control);
    std::memcpy(to + control, &message.inputs, sizeof(StepInputs));
    if (groups > 0) {
      std::memcpy(to + control + sizeof(StepInputs), message.groups.data(), groups);
    }
  });
  context_.device.copy(parts_.arrays.control(), to, control, context_.stream);
  context_.device.copy(parts_.arrays.inputs(), to + control, sizeof(StepInputs), context_.stream);
  context_.device.copy(parts_.arrays.groups(), to + control + sizeof(StepInputs), groups,
                       context_.stream);
}

void Stepper::measure_and_update(const std::string& what) {
  Arrays& arrays = parts_.arrays;
  const auto classes = context_.plan.classes();
  for (std::size_t c = 0; c < classes.size(); ++c) {
    if (classes[c].train == Train::kYes) {
      context_.device.measure(arrays.arguments(c), context_.stream);
    }
  }
  const std::array<Transfer, 1> control{
      Transfer{arrays.control(), arrays.control(), arrays.control_words(), DType::kInt64}};
  context_.all_reduce(control, what);
  context_.device.prepare(arrays.arguments(0), context_.stream);
  parts_.gather.order_after_readers();
  for (std::size_t c = 0; c < classes.size(); ++c) {
    if (classes[c].train == Train::kYes) {
      context_.device.update(classes[c].rule, arrays.arguments(c), context_.stream);
    }
  }
}

// Stages 1 and 2: every rank gets the shards that the others updated, a group of units at a time,
// so that the next forward starts with the first group.
void Stepper::refresh_replicas() {
  const std::size_t units = context_.model().units().size();
  if (context_.stage() == Stage::kReplicated) {
    const Event updated = context_.device.record(context_.stream);
    for (std::size_t u = 0; u < units; ++u) {
      parts_.gather.set_ready(static_cast<UnitId>(u), updated);
    }
  }
  if (context_.stage() == Stage::kReplicated || context_.parameters_sharded()) {
    return;
  }
  in_groups(
      context_, transfers_,
      [&](const Segment& s) {
        if (context_.trained(s)) {
          transfers_.push_back({parts_.arrays.own_parameters(s), parts_.arrays.full_parameters(s),
                                context_.shard_elements(s),
                                context_.plan.classes()[s.class_index].precision.parameter});
        }
      },
      [&](UnitId first, UnitId last) {
        const Event gathered = context_.all_gather(
            transfers_, group_label(context_, "updated parameters", first, last));
        for (std::size_t u = index(first); u <= index(last); ++u) {
          parts_.gather.set_ready(static_cast<UnitId>(u), gathered);
        }
      });
}

std::shared_ptr<StepState> Stepper::enqueue_result() {
  auto state = std::make_shared<StepState>();
  state->context = &context_;
  state->begin = begin_;
  state->wire_bytes = context_.statistics.wire_bytes - wire_bytes_at_begin_;
  wire_bytes_at_begin_ = context_.statistics.wire_bytes;
  begun_ = false;
  const auto* result = result_.as<StepScalars>();
  context_.device.copy(result_.data(), parts_.arrays.scalars(), sizeof(StepScalars),
                       context_.stream);
  context_.device.call(context_.stream, [state, result] {
    state->scalars = *result;
    state->end = std::chrono::steady_clock::now();
    state->filled = true;
  });
  state->event = context_.device.record(context_.stream);
  std::erase_if(outstanding_, [](const auto& weak) { return weak.expired(); });
  outstanding_.push_back(state);
  return state;
}

}  // namespace zero
