#include "engine/arrays.h"

#include <limits>
#include <vector>

#include "core/chunks.h"

namespace zero {

Arrays::Arrays(Context& context) : context_(context) {
  const Plan& plan = context.plan;
  classes_.resize(plan.classes().size());
  real_own_.resize(classes_.size());
  real_all_.resize(classes_.size());
  for (std::size_t u = 0; u < plan.model().units().size(); ++u) {
    for (const Extent& e : plan.extents(context.rank, static_cast<UnitId>(u))) {
      real_own_[plan.segments()[plan.place(e.parameter).segment].class_index] += e.count;
    }
  }
  for (std::size_t p = 0; p < plan.model().parameters().size(); ++p) {
    const Place& place = plan.place(static_cast<ParameterId>(p));
    real_all_[plan.segments()[place.segment].class_index] += plan.model().parameters()[p].count;
  }
  for (std::size_t c = 0; c < classes_.size(); ++c) {
    allocate_class(c);
  }
  allocate_buffers();
  allocate_tables();
}

void Arrays::allocate_class(std::size_t c) {
  const ParameterClass& what = context_.plan.classes()[c];
  ClassArrays& arrays = classes_[c];
  const auto allocation = [&](bool sharded, std::size_t size, Category category) {
    const std::uint64_t elements =
        sharded ? what.elements / static_cast<std::uint64_t>(context_.world) : what.elements;
    const std::uint64_t real = sharded ? real_own_[c] : real_all_[c];
    return Allocation{elements * size, category, (elements - real) * size};
  };
  Communicator& ranks = context_.ranks;
  arrays.parameters = ranks.allocate(
      context_.device, allocation(context_.parameters_sharded(), bytes_of(what.precision.parameter),
                                  Category::kParameters));
  if (what.train == Train::kFrozen) {
    return;
  }
  arrays.gradients =
      ranks.allocate(context_.device,
                     allocation(context_.gradients_sharded(), sizeof(float), Category::kGradients));
  if (what.precision.master == Master::kFloat32) {
    arrays.master = ranks.allocate(
        context_.device, allocation(context_.states_sharded(), sizeof(float), Category::kMaster));
  }
  for (const StateSpec& state : what.rule.states) {
    arrays.states.push_back(context_.device.allocate(
        allocation(context_.states_sharded(), bytes_of(state.dtype), Category::kStates)));
  }
}

void Arrays::allocate_buffers() {
  const Plan& plan = context_.plan;
  Communicator& ranks = context_.ranks;
  Backend& device = context_.device;
  if (context_.parameters_sharded()) {
    std::uint64_t bytes = 0;
    for (const Slot& slot : plan.slots()) {
      bytes += slot.bytes;
    }
    live_ = ranks.allocate(device, {bytes, Category::kLiveUnits});
  }
  if (plan.bucket_buffer_bytes() > 0) {
    for (int b = 0; b < plan.options().buckets; ++b) {
      buckets_.push_back(ranks.allocate(device, {plan.bucket_buffer_bytes(), Category::kBuckets}));
    }
  }
  until_ready_at_.resize(plan.model().units().size(), std::numeric_limits<std::size_t>::max());
  for (std::size_t u = 0; u < until_ready_at_.size(); ++u) {
    const std::uint64_t bytes = plan.gradient_bytes(static_cast<UnitId>(u));
    if (plan.model().units()[u].life == GradientLife::kUntilReady && bytes > 0) {
      until_ready_at_[u] = until_ready_.size();
      for (int open = 0; open < plan.options().max_open_micro_batches; ++open) {
        until_ready_.push_back(ranks.allocate(device, {bytes, Category::kBuckets}));
      }
    }
  }
  if (plan.reduce_scratch_elements() > 0) {
    reduce_scratch_ = ranks.allocate(
        device, {plan.reduce_scratch_elements() * sizeof(float), Category::kScratch});
  }
  for (const ParameterClass& c : plan.classes()) {
    partial_at_.push_back(partial_level_);
    if (c.train == Train::kYes) {
      partial_level_ += c.elements / static_cast<std::uint64_t>(context_.world);
    }
  }
  if (plan.partial_sums() > 0) {
    partial_sums_ = ranks.allocate(
        device, {partial_level_ * plan.partial_sums() * sizeof(float), Category::kScratch});
  }
}

void Arrays::allocate_tables() {
  const ModelSpec& model = context_.model();
  Backend& device = context_.device;
  const auto world = static_cast<std::size_t>(context_.world);
  const auto table = [&](std::size_t bytes) {
    return device.allocate({bytes, Category::kScratch});
  };
  for (std::size_t c = 0; c < classes_.size(); ++c) {
    if (context_.plan.classes()[c].train == Train::kYes) {
      const auto rows =
          context_.plan.chunk_counts(context_.rank, static_cast<std::uint32_t>(c)).updated;
      classes_[c].chunks = table(rows * sizeof(Chunk));
    }
  }
  rows_ = table(model.parameters().size() * sizeof(ParameterRow));
  groups_ = table(model.groups().size() * sizeof(Hyper));
  inputs_ = table(sizeof(StepInputs));
  scalars_ = table(sizeof(StepScalars));
  control_ = context_.ranks.allocate(
      device, {ControlLayout::words(world, model.parameters().size()) * sizeof(std::int64_t),
               Category::kScratch});
  write_rows();
  for (std::size_t c = 0; c < classes_.size(); ++c) {
    fill_chunks(c);
  }
}

void Arrays::write_rows() {
  std::vector<ParameterRow> rows;
  for (const ModelSpec::Parameter& p : context_.model().parameters()) {
    rows.push_back({.group = static_cast<std::uint32_t>(p.group),
                    .counted = p.norm == CountInNorm::kYes ? 1U : 0U});
  }
  context_.device.copy(rows_.data(), rows.data(), rows_.bytes(), kHost);
  const StepScalars none{};
  context_.device.copy(scalars_.data(), &none, sizeof(none), kHost);
}

void Arrays::fill_chunks(std::size_t c) {
  ClassArrays& arrays = classes_[c];
  const ParameterClass& what = context_.plan.classes()[c];
  UpdateArguments& a = arrays.arguments;
  a.rows = rows();
  a.row_count = context_.model().parameters().size();
  a.groups = groups();
  a.inputs = inputs();
  a.scalars = scalars();
  a.control = control();
  a.rank = context_.rank;
  a.world = context_.world;
  a.parameters = arrays.parameters.data();
  a.parameter_dtype = what.precision.parameter;
  if (what.train == Train::kFrozen) {
    return;
  }
  a.gradients = arrays.gradients.as<const float>();
  a.master = arrays.master.as<float>();
  for (std::size_t s = 0; s < arrays.states.size(); ++s) {
    a.states.at(s) = arrays.states[s].data();
  }
  std::vector<Chunk> chunks;
  for_each_chunk(context_.plan, context_.rank, static_cast<std::uint32_t>(c),
                 [&](const Chunk& chunk, bool own) {
                   chunks.push_back(chunk);
                   a.measured_chunks += own ? 1 : 0;
                 });
  a.chunks = arrays.chunks.as<const Chunk>();
  a.chunk_count = chunks.size();
  context_.device.copy(arrays.chunks.data(), chunks.data(), arrays.chunks.bytes(), kHost);
}

void Arrays::reset_states() {
  context_.finish();  // a step in flight reads and writes both
  for (ClassArrays& arrays : classes_) {
    for (const Buffer& state : arrays.states) {
      context_.device.fill(state.data(), 0, state.bytes(), kHost);
    }
  }
  write_rows();
}

std::uint64_t Arrays::own_at(const Segment& s, bool sharded) const {
  const auto w = static_cast<std::uint64_t>(context_.world);
  return sharded ? s.offset / w
                 : s.offset + static_cast<std::uint64_t>(context_.rank) * (s.elements / w);
}

std::byte* Arrays::own_parameters(const Segment& s) const {
  const std::size_t size = bytes_of(context_.plan.classes()[s.class_index].precision.parameter);
  return classes_[s.class_index].parameters.as<std::byte>() +
         own_at(s, context_.parameters_sharded()) * size;
}

std::byte* Arrays::full_parameters(const Segment& s) const {
  const std::size_t size = bytes_of(context_.plan.classes()[s.class_index].precision.parameter);
  return classes_[s.class_index].parameters.as<std::byte>() + s.offset * size;
}

float* Arrays::own_gradients(const Segment& s) const {
  return classes_[s.class_index].gradients.as<float>() + own_at(s, context_.gradients_sharded());
}

float* Arrays::full_gradients(const Segment& s) const {
  return classes_[s.class_index].gradients.as<float>() + s.offset;
}

float* Arrays::own_master(const Segment& s) const {
  float* base = classes_[s.class_index].master.as<float>();
  return base == nullptr ? nullptr : base + own_at(s, context_.states_sharded());
}

float* Arrays::full_master(const Segment& s) const {
  return classes_[s.class_index].master.as<float>() + s.offset;
}

float* Arrays::own_state(const Segment& s, std::size_t state) const {
  return classes_[s.class_index].states[state].as<float>() + own_at(s, context_.states_sharded());
}

float* Arrays::partial(const Segment& s, std::uint32_t level) const {
  if (level == context_.plan.partial_sums()) {
    return own_gradients(s);
  }
  return partial_sums_.as<float>() + level * partial_level_ + partial_at_[s.class_index] +
         s.offset / static_cast<std::uint64_t>(context_.world);
}

std::byte* Arrays::live(UnitId unit) const {
  return live_.as<std::byte>() + context_.plan.slots()[context_.plan.slot_of(unit)].offset;
}

std::byte* Arrays::bucket(std::size_t i) const {
  return buckets_[i].as<std::byte>();
}

std::byte* Arrays::until_ready(UnitId unit, std::size_t open) const {
  return until_ready_[until_ready_at_[index(unit)] + open].as<std::byte>();
}

}  // namespace zero
