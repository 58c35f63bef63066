#include "engine/micro_batches.h"

#include <algorithm>

#include "zero/error.h"

namespace zero {

#ifdef ZERO_POISON
constexpr bool kPoison = true;  // unwritten gradients are NaN: a broken kOverwrite promise shows
#else
constexpr bool kPoison = false;
#endif

MicroBatches::MicroBatches(Context& context, Arrays& arrays, Reducer& reducer)
    : context_(context), arrays_(arrays), reducer_(reducer) {
  const ModelSpec& model = context.model();
  const auto open = static_cast<std::size_t>(context.plan.options().max_open_micro_batches);
  const std::size_t units = model.units().size();
  parameters_.resize(units);
  needs_ready_.resize(units);
  readied_.resize(units);
  used_.resize(model.parameters().size());
  until_ready_.assign(units, kNoBucket);
  for (std::size_t p = 0; p < model.parameters().size(); ++p) {
    parameters_[index(model.parameters()[p].unit)].push_back(static_cast<ParameterId>(p));
  }
  if (context.plan.bucket_buffer_bytes() > 0) {
    shared_buckets_ = static_cast<std::size_t>(context.plan.options().buckets);
  }
  for (std::size_t b = 0; b < shared_buckets_; ++b) {
    add_bucket(arrays.bucket(b), context.plan.bucket_buffer_bytes());
  }
  for (std::size_t u = 0; u < units; ++u) {
    const std::uint64_t bytes = context.plan.gradient_bytes(static_cast<UnitId>(u));
    needs_ready_[u] = bytes > 0 ? 1 : 0;
    units_to_ready_ += needs_ready_[u];
    if (bytes > 0 && model.units()[u].life == GradientLife::kUntilReady) {
      until_ready_[u] = buckets_.size();
      for (std::size_t slot = 0; slot < open; ++slot) {
        add_bucket(arrays.until_ready(static_cast<UnitId>(u), slot), bytes);
      }
    }
  }
  micros_.resize(open);
  for (std::size_t slot = 0; slot < open; ++slot) {
    micros_[slot].slot = slot;
    micros_[slot].units.resize(units);
    micros_[slot].written.resize(model.parameters().size());
  }
}

MicroBatches::~MicroBatches() {
  for (const Micro& m : micros_) {
    for (const UnitGradient& g : m.units) {
      g.writers.finish(context_.device);
    }
  }
}

void MicroBatches::add_bucket(std::byte* memory, std::uint64_t capacity) {
  Bucket& b = buckets_.emplace_back();
  b.memory = memory;
  b.capacity = capacity;
}

std::uint64_t MicroBatches::begin(bool last) {
  const Options& options = context_.plan.options();
  const auto free = std::find_if(micros_.begin(), micros_.end(),
                                 [&](const Micro& m) { return m.id == 0 || finished(m); });
  if (free == micros_.end()) {
    const auto open =
        std::find_if(micros_.begin(), micros_.end(), [&](const Micro& m) { return is_open(m.id); });
    throw UsageError(context_.who() + "begin_micro_batch() with " + std::to_string(open_count()) +
                     " open: make the missing units ready (the first is '" +
                     context_.name(missing_unit(open->id)) +
                     "') or raise Options::max_open_micro_batches");
  }
  require(!last_begun_, context_.who() +
                            "begin_micro_batch() after the one that was begun as the last: call "
                            "step() first");
  if (options.numerics == Numerics::kWorldInvariant && begun_ >= options.max_micro_batches) {
    throw UsageError(context_.who() + "begin_micro_batch() number " + std::to_string(begun_ + 1) +
                     " of a step, but Options::max_micro_batches is " +
                     std::to_string(options.max_micro_batches) +
                     ": the partial sums of kWorldInvariant are planned for so many");
  }
  release_micro(*free);
  free->id = next_id_++;
  free->ordinal = static_cast<std::uint32_t>(begun_++);
  last_begun_ = last;
  return free->id;
}

void MicroBatches::release_micro(Micro& m) {
  m.id = 0;
  m.ready = 0;
  m.bucket = kNoBucket;
  for (UnitGradient& g : m.units) {
    g.progress = Progress::kNone;
    g.leases = 0;
    g.writers.clear();
  }
  std::fill(m.written.begin(), m.written.end(), Written::kNo);
}

// Complete, and no bucket of it waits for an earlier micro-batch's turn.
bool MicroBatches::finished(const Micro& m) const {
  return m.ready == units_to_ready_ &&
         std::none_of(closed_.begin(), closed_.end(),
                      [&](std::size_t b) { return buckets_[b].micro == m.slot; });
}

bool MicroBatches::is_open(std::uint64_t id) const {
  return std::any_of(micros_.begin(), micros_.end(), [&](const Micro& m) {
    return id != 0 && m.id == id && m.ready < units_to_ready_;
  });
}

int MicroBatches::open_count() const {
  return static_cast<int>(std::count_if(micros_.begin(), micros_.end(), [&](const Micro& m) {
    return m.id != 0 && m.ready < units_to_ready_;
  }));
}

const MicroBatches::Micro& MicroBatches::find(std::uint64_t id) const {
  const auto found = std::find_if(micros_.begin(), micros_.end(),
                                  [&](const Micro& m) { return m.id == id && id != 0; });
  require(found != micros_.end(), context_.who() +
                                      "use of a micro-batch that is complete, abandoned or from "
                                      "before the last step: begin a new one");
  return *found;
}

MicroBatches::Micro& MicroBatches::find(std::uint64_t id) {
  return const_cast<Micro&>(static_cast<const MicroBatches&>(*this).find(id));
}

void MicroBatches::open_lease(std::uint64_t id, UnitId unit, StreamRef stream) {
  Micro& m = find(id);
  UnitGradient& g = unit_to_write(m, unit, stream, "gradients()");
  if (needs_ready_[index(unit)] != 0) {
    place(m, unit);
    order_writer(g, stream);
  }
  g.leased_on = stream;
  ++g.leases;
}

void MicroBatches::close_lease(std::uint64_t id, UnitId unit, StreamRef stream) {
  for (Micro& m : micros_) {
    if (m.id == id) {
      UnitGradient& g = m.units[index(unit)];
      g.writers.add(stream, context_.device.record(stream));
      --g.leases;
    }
  }
}

MicroBatches::UnitGradient& MicroBatches::unready_unit(Micro& m, UnitId unit, const char* verb) {
  require(index(unit) < m.units.size(),
          context_.who() + verb + " of a unit that is not in the model");
  UnitGradient& g = m.units[index(unit)];
  if (g.progress == Progress::kReady) {
    throw UsageError(context_.who() + verb + " of unit '" + context_.name(unit) +
                     "' after ready() in the same micro-batch: ready() comes once, after the "
                     "last contribution");
  }
  return g;
}

// Two streams that write under open leases have no order between them, not even with the zero fill
// of Write::kAdd; the end of a lease gives one.
MicroBatches::UnitGradient& MicroBatches::unit_to_write(Micro& m, UnitId unit, StreamRef stream,
                                                        const char* verb) {
  UnitGradient& g = unready_unit(m, unit, verb);
  require(g.leases == 0 || g.leased_on == stream,
          context_.who() + verb + " of unit '" + context_.name(unit) +
              "' while a gradient lease of it is open on another stream: end that lease first, "
              "and the streams are ordered");
  return g;
}

const ModelSpec::Parameter& MicroBatches::trained_parameter(ParameterId parameter) const {
  const ModelSpec& model = context_.model();
  require(index(parameter) < model.parameters().size(),
          context_.who() + "gradient of a parameter that is not in the model");
  const ModelSpec::Parameter& p = model.parameters()[index(parameter)];
  if (model.groups()[index(p.group)].options.train == Train::kFrozen) {
    throw UsageError(context_.who() + "parameter '" + p.name + "' is frozen (group '" +
                     model.groups()[index(p.group)].name + "'): it has no gradient");
  }
  return p;
}

DType MicroBatches::gradient_dtype(ParameterId parameter) const {
  const Segment& s = context_.plan.segments()[context_.plan.place(parameter).segment];
  return context_.plan.classes()[s.class_index].precision.gradient;
}

std::byte* MicroBatches::address(const Micro& m, ParameterId parameter) const {
  const Place& place = context_.plan.place(parameter);
  const Segment& s = context_.plan.segments()[place.segment];
  const UnitGradient& g = m.units[index(s.unit)];
  return g.data == nullptr || g.progress == Progress::kNone
             ? nullptr
             : g.data + s.gradient_bytes_at + place.offset * bytes_of(gradient_dtype(parameter));
}

void* MicroBatches::data(std::uint64_t id, ParameterId parameter, DType dtype, Write write,
                         UnitId unit, StreamRef stream) {
  Micro& m = find(id);
  const ModelSpec::Parameter& p = trained_parameter(parameter);
  if (p.unit != unit) {
    throw UsageError(context_.who() + "parameter '" + p.name + "' belongs to unit '" +
                     context_.name(p.unit) + "', but the gradient lease is of unit '" +
                     context_.name(unit) + "'");
  }
  if (dtype != gradient_dtype(parameter)) {
    throw UsageError(context_.who() + "the gradient of parameter '" + p.name + "' is " +
                     std::string(name_of(gradient_dtype(parameter))) + ", but was asked for as " +
                     std::string(name_of(dtype)));
  }
  Written& written = m.written[index(parameter)];
  if (written == Written::kUnused) {
    throw UsageError(context_.who() + "gradient of parameter '" + p.name + "' of unit '" +
                     context_.name(unit) + "' after mark_unused() in the same micro-batch");
  }
  std::byte* at = address(m, parameter);
  if (written == Written::kNo && (write == Write::kAdd || kPoison)) {
    context_.device.fill(at, write == Write::kAdd ? 0 : 0xff, p.count * bytes_of(dtype), stream);
  }
  written = Written::kYes;
  return at;
}

void MicroBatches::add(std::uint64_t id, ParameterId parameter, const void* from, DType dtype,
                       StreamRef stream) {
  Micro& m = find(id);
  const ModelSpec::Parameter& p = trained_parameter(parameter);
  UnitGradient& g = unit_to_write(m, p.unit, stream, "add_gradient()");
  require(dtype == DType::kFloat32 || dtype == DType::kBfloat16,
          context_.who() + "add_gradient() of parameter '" + p.name +
              "': expected float32 or bfloat16, found " + std::string(name_of(dtype)));
  Written& written = m.written[index(parameter)];
  require(written != Written::kUnused, context_.who() + "gradient of parameter '" + p.name +
                                           "' after mark_unused() in the same micro-batch");
  if (p.count > 0) {
    require(from != nullptr,
            context_.who() + "add_gradient() of parameter '" + p.name + "' from a null pointer");
    place(m, p.unit);
    order_writer(g, stream);
    context_.device.accumulate(address(m, parameter), gradient_dtype(parameter), from, dtype,
                               p.count, written == Written::kNo ? First::kYes : First::kNo, stream);
    g.writers.add(stream, context_.device.record(stream));
  }
  written = Written::kYes;
}

void MicroBatches::mark_unused(std::uint64_t id, ParameterId parameter) {
  Micro& m = find(id);
  const ModelSpec::Parameter& p = trained_parameter(parameter);
  (void)unready_unit(m, p.unit, "mark_unused()");
  Written& written = m.written[index(parameter)];
  require(written != Written::kYes, context_.who() + "mark_unused() of parameter '" + p.name +
                                        "', which has a gradient in this micro-batch");
  written = Written::kUnused;
}

bool MicroBatches::ready(std::uint64_t id, UnitId unit, StreamRef stream) {
  Micro& m = find(id);
  UnitGradient& g = unready_unit(m, unit, "ready()");
  require(g.leases == 0, context_.who() + "ready() of unit '" + context_.name(unit) +
                             "' while a gradient lease of it is open: end the lease first");
  if (needs_ready_[index(unit)] == 0) {
    return false;
  }
  const bool in_order = context_.plan.options().numerics != Numerics::kWorldInvariant ||
                        readied_[index(unit)] == m.ordinal;
  require(in_order, context_.who() + "unit '" + context_.name(unit) +
                        "' becomes ready in micro-batch " + std::to_string(m.ordinal) +
                        " before micro-batch " + std::to_string(readied_[index(unit)]) +
                        ": kWorldInvariant sums in the order of begin_micro_batch()");
  finish_parameters(m, unit, stream);
  g.progress = Progress::kReady;
  g.turn = readied_[index(unit)]++;
  ++m.ready;
  const bool complete = m.ready == units_to_ready_;
  if (until_ready_[index(unit)] != kNoBucket) {
    close(g.bucket);
  }
  if (complete && m.bucket != kNoBucket) {
    close(m.bucket);
  }
  launch_closed();
  return complete;
}

// Every parameter has a gradient or a zero in its place; the writer on `stream` is noted.
void MicroBatches::finish_parameters(Micro& m, UnitId unit, StreamRef stream) {
  for (const ParameterId parameter : parameters_[index(unit)]) {
    const ModelSpec::Parameter& p = context_.model().parameters()[index(parameter)];
    const bool frozen = context_.model().groups()[index(p.group)].options.train == Train::kFrozen;
    if (!frozen && p.count > 0 && m.written[index(parameter)] == Written::kNo) {
      throw UsageError(context_.who() + "ready() of unit '" + context_.name(unit) +
                       "', but parameter '" + p.name +
                       "' has no gradient: write it, or call mark_unused()");
    }
  }
  place(m, unit);
  UnitGradient& g = m.units[index(unit)];
  order_writer(g, stream);
  for (const ParameterId parameter : parameters_[index(unit)]) {
    const std::size_t p = index(parameter);
    if (m.written[p] == Written::kUnused) {
      context_.device.fill(
          address(m, parameter), 0,
          context_.model().parameters()[p].count * bytes_of(gradient_dtype(parameter)), stream);
    }
    used_[p] = (used_[p] != 0 || m.written[p] == Written::kYes) ? 1 : 0;
  }
  g.writers.clear();  // `stream` is behind all of them
  g.writers.add(stream, context_.device.record(stream));
}

// Earlier writers have waited for the memory to be free, and whoever waits for them has too.
void MicroBatches::order_writer(const UnitGradient& g, StreamRef stream) {
  if (g.writers.empty()) {
    context_.device.wait(stream, buckets_[g.bucket].free);
  }
  g.writers.order_before(stream, context_.device);
}

void MicroBatches::require_complete() const {
  require(begun_ > 0, context_.who() + "step() without a micro-batch since the last one");
  for (const Micro& m : micros_) {
    if (m.id != 0 && m.ready < units_to_ready_) {
      throw UsageError(context_.who() + "step() before unit '" + context_.name(missing_unit(m.id)) +
                       "' is ready in micro-batch " + std::to_string(m.ordinal));
    }
  }
}

UnitId MicroBatches::missing_unit(std::uint64_t id) const {
  const Micro& m = find(id);
  for (std::size_t u = 0; u < m.units.size(); ++u) {
    if (needs_ready_[u] != 0 && m.units[u].progress != Progress::kReady) {
      return static_cast<UnitId>(u);
    }
  }
  return UnitId{};
}

void MicroBatches::require_no_lease() const {
  for (const Micro& m : micros_) {
    for (std::size_t u = 0; u < m.units.size(); ++u) {
      require(m.units[u].leases == 0, context_.who() + "a gradient lease of unit '" +
                                          context_.name(static_cast<UnitId>(u)) +
                                          "' is open: end it first");
    }
  }
}

}  // namespace zero
