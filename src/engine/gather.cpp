#include "engine/gather.h"

#include <algorithm>

#include "zero/error.h"

namespace zero {

Gather::Gather(Context& context, Arrays& arrays) : context_(context), arrays_(arrays) {
  const auto& units = context.model().units();
  open_leases_.resize(units.size());
  ready_.resize(units.size());
  slots_.resize(context.plan.slots().size());
  for (const auto& unit : units) {
    labels_.push_back("parameters of unit '" + unit.name + "'");
  }
}

Gather::~Gather() {
  readers_.finish(context_.device);
  for (const SlotState& slot : slots_) {
    slot.readers.finish(context_.device);
  }
}

void Gather::open(UnitId unit, StreamRef stream) {
  require(index(unit) < open_leases_.size(),
          context_.who() + "parameters() of a unit that is not in the model");
  if (!context_.parameters_sharded()) {
    context_.device.wait(stream, ready_[index(unit)]);
    ++open_leases_[index(unit)];
    return;
  }
  SlotState& slot = slot_of(unit);
  if (slot.unit != unit && slot.open_leases > 0) {
    throw UsageError(context_.who() + "unit '" + context_.name(unit) +
                     "' cannot be leased while the lease of unit '" + context_.name(*slot.unit) +
                     "' is open: both use one of live_units = " +
                     std::to_string(context_.plan.options().live_units) +
                     " slots; end that lease first or raise Options::live_units");
  }
  follow_order(unit);
  if (slot.unit != unit) {
    gather(slot, unit);
  } else if (slot.prefetched) {
    ++context_.statistics.prefetch_hits;
  }
  slot.prefetched = false;
  context_.device.wait(stream, slot.gathered);
  ++slot.open_leases;
  ++open_leases_[index(unit)];
  prefetch_next();
}

void Gather::used_on(UnitId unit, StreamRef stream) {
  StreamPoints& readers = context_.parameters_sharded() ? slot_of(unit).readers : readers_;
  readers.add(stream, context_.device.record(stream));
}

void Gather::close(UnitId unit, StreamRef stream) {
  used_on(unit, stream);
  --open_leases_[index(unit)];
  if (!context_.parameters_sharded()) {
    return;
  }
  SlotState& slot = slot_of(unit);
  --slot.open_leases;
  if (slot.open_leases == 0 && slot.awaited.has_value() && !context_.poisoned()) {
    const UnitId next = *slot.awaited;
    slot.awaited.reset();
    prefetch(next);
  }
}

const void* Gather::data(UnitId unit, ParameterId parameter, DType dtype) const {
  const ModelSpec& model = context_.model();
  require(index(parameter) < model.parameters().size(),
          context_.who() + "data() of a parameter that is not in the model");
  const ModelSpec::Parameter& p = model.parameters()[index(parameter)];
  if (p.unit != unit) {
    throw UsageError(context_.who() + "parameter '" + p.name + "' belongs to unit '" +
                     context_.name(p.unit) + "', but the lease is of unit '" + context_.name(unit) +
                     "'");
  }
  const Place& place = context_.plan.place(parameter);
  const Segment& segment = context_.plan.segments()[place.segment];
  const DType actual = context_.plan.classes()[segment.class_index].precision.parameter;
  if (actual != dtype) {
    throw UsageError(context_.who() + "parameter '" + p.name + "' is " +
                     std::string(name_of(actual)) + ", but was asked for as " +
                     std::string(name_of(dtype)));
  }
  const std::byte* base = context_.parameters_sharded() ? arrays_.live(unit) + segment.unit_bytes_at
                                                        : arrays_.full_parameters(segment);
  return base + place.offset * bytes_of(dtype);
}

void Gather::begin_pass(Pass kind) {
  if (!recording_.empty()) {
    std::swap(orders_.at(static_cast<std::size_t>(pass_)), recording_);
    recording_.clear();
  }
  pass_ = kind;
  cursor_ = 0;
  if (kind == Pass::kBackward && context_.parameters_sharded()) {
    prefetch_next();
  }
}

std::optional<UnitId> Gather::open_unit() const {
  const auto open =
      std::find_if(open_leases_.begin(), open_leases_.end(), [](int leases) { return leases > 0; });
  if (open == open_leases_.end()) {
    return std::nullopt;
  }
  return static_cast<UnitId>(open - open_leases_.begin());
}

void Gather::order_after_readers() {
  readers_.order_before(context_.stream, context_.device);
}

void Gather::invalidate() {
  readers_.clear();
  for (SlotState& slot : slots_) {
    slot.unit.reset();
    slot.awaited.reset();
    slot.prefetched = false;
  }
  begin_pass(Pass::kForward);
}

void Gather::take_slot(UnitId unit) {
  SlotState& slot = slot_of(unit);
  slot.readers.order_before(context_.stream, context_.device);
  slot.readers.clear();
  slot.unit.reset();
}

// Moves the cursor behind `unit` and notes it. An order that repeats itself (evaluation of many
// batches in one pass) is found again from the start, and recorded only so far.
void Gather::follow_order(UnitId unit) {
  const std::vector<UnitId>& order = orders_.at(static_cast<std::size_t>(pass_));
  const auto from = order.begin() + static_cast<std::ptrdiff_t>(std::min(cursor_, order.size()));
  auto found = from;
  if (from == order.end() || *from != unit) {
    context_.statistics.order_changes += from != order.end() ? 1U : 0U;
    found = std::find(from, order.end(), unit);
    found = found == order.end() ? std::find(order.begin(), order.end(), unit) : found;
  }
  if (found != order.end()) {
    cursor_ = static_cast<std::size_t>(found - order.begin()) + 1;
  }
  if (recording_.size() < 4 * open_leases_.size() + 16) {
    recording_.push_back(unit);
  }
}

void Gather::prefetch_next() {
  for (SlotState& slot : slots_) {
    slot.awaited.reset();
  }
  const std::vector<UnitId>& order = orders_.at(static_cast<std::size_t>(pass_));
  if (cursor_ < order.size()) {
    prefetch(order[cursor_]);
  }
}

void Gather::prefetch(UnitId unit) {
  SlotState& slot = slot_of(unit);
  if (slot.unit == unit) {
    return;
  }
  if (slot.open_leases > 0) {
    slot.awaited = unit;
    return;
  }
  gather(slot, unit);
  slot.prefetched = true;
  ++context_.statistics.prefetches;
}

void Gather::gather(SlotState& slot, UnitId unit) {
  transfers_.clear();
  after_.clear();
  slot.readers.append_to(after_);
  slot.readers.clear();
  for (const Segment& s : context_.plan.segments(unit)) {
    transfers_.push_back({arrays_.own_parameters(s), arrays_.live(unit) + s.unit_bytes_at,
                          context_.shard_elements(s),
                          context_.plan.classes()[s.class_index].precision.parameter});
  }
  slot.unit = unit;
  slot.gathered = context_.all_gather(transfers_, labels_[index(unit)], after_);
  ++context_.statistics.gathers;
}

}  // namespace zero
