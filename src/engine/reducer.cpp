#include "engine/reducer.h"

#include <algorithm>
#include <bit>

#include "engine/groups.h"

namespace zero {

Reducer::Reducer(Context& context, Arrays& arrays) : context_(context), arrays_(arrays) {
  const std::size_t units = context.model().units().size();
  summed_.resize(units);
  reduced_.resize(units);
}

// Stages 0 and 1 hold the whole fp32 gradient: several micro-batches are summed here before ranks
// meet once, unless the numerics ask for ranks first.
bool Reducer::reduces_once() const {
  return !context_.gradients_sharded() && context_.plan.options().numerics == Numerics::kFast;
}

Event Reducer::add(std::span<const Contribution> contributions, std::span<const Event> after) {
  transfers_.clear();
  additions_.clear();
  scratch_used_ = 0;
  bool waited = false;
  for (const Contribution& c : contributions) {
    if (reduces_once() && !(c.complete && summed(c.unit) == 0)) {
      for (std::size_t e = 0; !waited && e < after.size(); ++e) {
        context_.device.wait(context_.stream, after[e]);
      }
      waited = true;
      add_locally(c);
    } else {
      add_reduced(c);
    }
    reduced_[index(c.unit)] = (c.complete || !reduces_once()) ? 1 : 0;
    ++summed_[index(c.unit)];
  }
  if (transfers_.empty()) {
    return context_.device.record(context_.stream);
  }
  const Event read = context_.reduce_scatter(transfers_, label(contributions), after);
  for (const Addition& addition : additions_) {
    carry(addition);
  }
  return read;
}

void Reducer::add_locally(const Contribution& c) {
  const First first = summed(c.unit) == 0 ? First::kYes : First::kNo;
  for (const Segment& s : context_.plan.segments(c.unit)) {
    if (context_.trained(s)) {
      context_.device.accumulate(arrays_.full_gradients(s), DType::kFloat32,
                                 c.data + s.gradient_bytes_at,
                                 context_.plan.classes()[s.class_index].precision.gradient,
                                 s.elements, first, context_.stream);
      if (c.complete) {
        transfers_.push_back({arrays_.full_gradients(s), arrays_.own_gradients(s),
                              context_.shard_elements(s), DType::kFloat32});
      }
    }
  }
}

// The first sum over ranks is stored where the gradient lives; kWorldInvariant stores sum number k
// at the level of k's lowest zero bit (a binary counter), so that all sums form one tree.
void Reducer::add_reduced(const Contribution& c) {
  const std::uint32_t k = summed(c.unit);
  const bool counter = context_.plan.options().numerics == Numerics::kWorldInvariant;
  for (const Segment& s : context_.plan.segments(c.unit)) {
    if (!context_.trained(s)) {
      continue;
    }
    float* out = arrays_.own_gradients(s);
    if (counter) {
      out = arrays_.partial(s, static_cast<std::uint32_t>(std::countr_one(k)));
    } else if (k > 0) {
      out = arrays_.reduce_scratch() + scratch_used_;
      scratch_used_ += context_.shard_elements(s);
    }
    transfers_.push_back({c.data + s.gradient_bytes_at, out, context_.shard_elements(s),
                          context_.plan.classes()[s.class_index].precision.gradient});
    if (k > 0) {
      additions_.push_back({&s, out, k});
    }
  }
}

void Reducer::carry(const Addition& a) {
  const auto add = [&](float* into, const float* from) {
    context_.device.accumulate(into, DType::kFloat32, from, DType::kFloat32,
                               context_.shard_elements(*a.segment), First::kNo, context_.stream);
  };
  if (context_.plan.options().numerics != Numerics::kWorldInvariant) {
    add(arrays_.own_gradients(*a.segment), a.from);
    return;
  }
  for (std::uint32_t level = 0; (a.summed >> level) % 2 == 1; ++level) {
    add(a.from, arrays_.partial(*a.segment, level));
  }
}

void Reducer::finish(int micro_batches) {
  if (context_.plan.options().numerics == Numerics::kWorldInvariant) {
    fold_partial_sums(micro_batches);
  }
  if (reduces_once()) {
    reduce_late();
  }
  if (context_.stage() == Stage::kReplicated) {
    gather_gradients();
  }
}

// Adds what the binary counter still holds, small subtrees first, into the gradient (its top
// level): the rest of the tree over micro-batches whose number is no power of two.
void Reducer::fold_partial_sums(int micro_batches) {
  const auto k = static_cast<std::uint32_t>(micro_batches);
  const std::uint32_t top = context_.plan.partial_sums();
  for (const Segment& s : context_.plan.segments()) {
    if (!context_.trained(s)) {
      continue;
    }
    const float* sum = nullptr;
    for (std::uint32_t level = 0; level <= top; ++level) {
      if ((k >> level) % 2 == 0) {
        continue;
      }
      if (sum != nullptr) {
        context_.device.accumulate(arrays_.partial(s, level), DType::kFloat32, sum, DType::kFloat32,
                                   context_.shard_elements(s), First::kNo, context_.stream);
      }
      sum = arrays_.partial(s, level);
    }
    if (sum != arrays_.own_gradients(s)) {
      context_.device.accumulate(arrays_.own_gradients(s), DType::kFloat32, sum, DType::kFloat32,
                                 context_.shard_elements(s), First::kYes, context_.stream);
    }
  }
}

void Reducer::reduce_late() {
  in_groups(
      context_, transfers_,
      [&](const Segment& s) {
        if (context_.trained(s) && reduced_[index(s.unit)] == 0) {
          transfers_.push_back({arrays_.full_gradients(s), arrays_.own_gradients(s),
                                context_.shard_elements(s), DType::kFloat32});
        }
      },
      [&](UnitId first, UnitId last) {
        context_.reduce_scatter(transfers_, group_label(context_, "late gradients", first, last));
        ++context_.statistics.late_reductions;
      });
}

void Reducer::gather_gradients() {
  in_groups(
      context_, transfers_,
      [&](const Segment& s) {
        if (context_.trained(s)) {
          transfers_.push_back({arrays_.own_gradients(s), arrays_.full_gradients(s),
                                context_.shard_elements(s), DType::kFloat32});
        }
      },
      [&](UnitId first, UnitId last) {
        context_.all_gather(transfers_, group_label(context_, "gradients", first, last));
      });
}

void Reducer::reset() {
  std::fill(summed_.begin(), summed_.end(), 0U);
  std::fill(reduced_.begin(), reduced_.end(), std::uint8_t{0});
}

std::string Reducer::label(std::span<const Contribution> contributions) const {
  std::string text = "gradients of units";
  for (const Contribution& c : contributions) {
    text += " '" + context_.name(c.unit) + "'";
  }
  return text;
}

}  // namespace zero
