#include "zero/plan.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>

#include "core/chunks.h"
#include "core/plan_check.h"

namespace zero {
namespace {

// So few that no sum of bytes below (28 an element, 36 on the wire of three micro-batches) passes
// 64 bits.
constexpr std::uint64_t kMostElements = std::uint64_t{1} << 57;
constexpr std::uint32_t kNone = std::numeric_limits<std::uint32_t>::max();

// Frozen parameters have no gradient, master or rule: they share a class whatever their group says.
ParameterClass class_of(const GroupOptions& group) {
  if (group.train == Train::kFrozen) {
    const DType dtype = group.precision.parameter;
    return {.train = Train::kFrozen, .precision = {dtype, dtype, Master::kNone}, .rule = {}};
  }
  return {.train = Train::kYes, .precision = group.precision, .rule = group.rule};
}

// Parameters in order of unit, and within a unit in order of add; counting sort.
struct ByUnit {
  std::vector<ParameterId> order;
  std::vector<std::uint32_t> begin;  // first of each unit in `order`, and the end

  explicit ByUnit(const ModelSpec& model)
      : order(model.parameters().size()), begin(model.units().size() + 1) {
    for (const ModelSpec::Parameter& p : model.parameters()) {
      ++begin[index(p.unit) + 1];
    }
    std::partial_sum(begin.begin(), begin.end(), begin.begin());
    std::vector<std::uint32_t> next(begin.begin(), begin.end() - 1);
    for (std::size_t p = 0; p < order.size(); ++p) {
      order[next[index(model.parameters()[p].unit)]++] = static_cast<ParameterId>(p);
    }
  }
};

// The class of each group that has parameters, in order of the classes' first appearance.
std::vector<std::uint32_t> find_classes(const ModelSpec& model,
                                        std::vector<ParameterClass>& classes) {
  std::vector<std::uint32_t> class_of_group(model.groups().size(), kNone);
  for (const ModelSpec::Parameter& p : model.parameters()) {
    std::uint32_t& found = class_of_group[index(p.group)];
    if (found == kNone) {
      const ParameterClass wanted = class_of(model.groups()[index(p.group)].options);
      const auto same = std::find(classes.begin(), classes.end(), wanted);
      found = static_cast<std::uint32_t>(same - classes.begin());
      if (same == classes.end()) {
        classes.push_back(wanted);
      }
    }
  }
  return class_of_group;
}

}  // namespace

// Fills a plan step by step; each method needs those above it.
class PlanBuilder {
 public:
  PlanBuilder(const ModelSpec& model, const Options& options, World world) {
    plan_.model_ = model;
    plan_.options_ = options;
    plan_.world_ = world;
    granule_ = static_cast<std::uint64_t>(world.shard_ranks) * kGranule;
  }

  [[nodiscard]] Plan build() {
    lay_out();
    assign_slots();
    size_buckets();
    size_scratch();
    // Throws where user bytes or counts of buffers pass 64 bits, so that no later question can.
    (void)plan_.peak_bytes(0);
    return std::move(plan_);
  }

 private:
  void lay_out() {
    const ModelSpec& model = plan_.model_;
    const ByUnit by_unit(model);
    const std::vector<std::uint32_t> class_of_group = find_classes(model, plan_.classes_);
    plan_.places_.resize(model.parameters().size());
    plan_.layout_.reserve(model.parameters().size());
    plan_.unit_begin_.push_back(0);
    for (std::size_t u = 0; u < model.units().size(); ++u) {
      const std::span<const ParameterId> mine(by_unit.order.data() + by_unit.begin[u],
                                              by_unit.begin[u + 1] - by_unit.begin[u]);
      lay_out_unit(static_cast<UnitId>(u), mine, class_of_group);
      plan_.unit_begin_.push_back(static_cast<std::uint32_t>(plan_.segments_.size()));
    }
    std::uint64_t elements = 0;
    for (const ParameterClass& c : plan_.classes_) {
      elements = checked_add(elements, c.elements);
    }
    require(elements <= kMostElements, "model: expected at most 2^57 elements, found " +
                                           std::to_string(elements) +
                                           "; look for a wrong dimension");
  }

  void lay_out_unit(UnitId unit, std::span<const ParameterId> parameters,
                    const std::vector<std::uint32_t>& class_of_group) {
    const auto class_of_parameter = [&](ParameterId p) {
      return class_of_group[index(plan_.model_.parameters()[index(p)].group)];
    };
    std::vector<std::uint32_t> seen;  // classes, in order of appearance
    for (const ParameterId p : parameters) {
      if (std::find(seen.begin(), seen.end(), class_of_parameter(p)) == seen.end()) {
        seen.push_back(class_of_parameter(p));
      }
    }
    Segment segment{.unit = unit};
    for (const std::uint32_t c : seen) {
      segment.class_index = c;
      segment.first = static_cast<std::uint32_t>(plan_.layout_.size());
      std::copy_if(parameters.begin(), parameters.end(), std::back_inserter(plan_.layout_),
                   [&](ParameterId p) { return class_of_parameter(p) == c; });
      place_segment(segment);
    }
  }

  // Places the parameters from layout_[segment.first] on, keeps the segment, and leaves in
  // `segment` where the unit's next one starts.
  void place_segment(Segment& segment) {
    ParameterClass& kind = plan_.classes_[segment.class_index];
    segment.offset = kind.elements;
    segment.count = static_cast<std::uint32_t>(plan_.layout_.size()) - segment.first;
    segment.elements = 0;
    for (const ParameterId p : std::span(plan_.layout_).subspan(segment.first)) {
      plan_.places_[index(p)] = {static_cast<std::uint32_t>(plan_.segments_.size()),
                                 segment.elements};
      const std::uint64_t count = plan_.model_.parameters()[index(p)].count;
      segment.elements = checked_add(segment.elements, round_up(count, kGranule));
    }
    segment.elements = round_up(segment.elements, granule_);
    kind.elements = checked_add(kind.elements, segment.elements);
    plan_.segments_.push_back(segment);
    const auto bytes_at_end = [&](std::uint64_t begin, DType dtype) {
      return checked_add(begin, checked_mul(segment.elements, bytes_of(dtype)));
    };
    segment.unit_bytes_at = bytes_at_end(segment.unit_bytes_at, kind.precision.parameter);
    if (kind.train == Train::kYes) {
      segment.gradient_bytes_at = bytes_at_end(segment.gradient_bytes_at, kind.precision.gradient);
    }
  }

  // A unit's slot depends on the unit, not on time, so that a captured graph stays valid.
  void assign_slots() {
    if (plan_.options_.stage != Stage::kParameters) {
      return;
    }
    const auto& units = plan_.model_.units();
    const auto in_turn = static_cast<std::size_t>(std::count_if(
        units.begin(), units.end(), [](const auto& u) { return u.life == GradientLife::kBucket; }));
    const std::size_t shared =
        std::min(in_turn, static_cast<std::size_t>(plan_.options_.live_units));
    plan_.slots_.resize(shared + units.size() - in_turn);
    std::size_t turn = 0, own = shared;
    for (std::size_t u = 0; u < units.size(); ++u) {
      const std::size_t slot = units[u].life == GradientLife::kBucket ? turn++ % shared : own++;
      plan_.slot_of_unit_.push_back(static_cast<std::uint32_t>(slot));
      plan_.slots_[slot].bytes =
          std::max(plan_.slots_[slot].bytes, plan_.unit_bytes(static_cast<UnitId>(u)));
    }
    std::uint64_t arena = 0;
    for (Slot& slot : plan_.slots_) {
      slot.offset = arena;
      arena = checked_add(arena, slot.bytes);
    }
  }

  void size_buckets() {
    std::uint64_t largest = 0, all = 0;
    for (std::size_t u = 0; u < plan_.model_.units().size(); ++u) {
      if (plan_.model_.units()[u].life == GradientLife::kBucket) {
        const std::uint64_t bytes = plan_.gradient_bytes(static_cast<UnitId>(u));
        largest = std::max(largest, bytes);
        all = checked_add(all, bytes);
      }
    }
    const std::uint64_t wanted = std::max<std::uint64_t>(plan_.options_.bucket_bytes, largest);
    plan_.bucket_bytes_ = round_up(std::min(wanted, all), kGranule);
  }

  // Later micro-batches are reduced into scratch and added from there; not where they are summed
  // before they are reduced, and not where each has a partial sum to land in.
  void size_scratch() {
    const Options& options = plan_.options_;
    const bool summed_locally =
        options.stage <= Stage::kStates && options.numerics == Numerics::kFast;
    if (summed_locally || options.numerics == Numerics::kWorldInvariant) {
      return;
    }
    const auto world = static_cast<std::uint64_t>(plan_.world_.shard_ranks);
    std::uint64_t smallest = 0;  // bytes of a gradient element in buckets
    for (std::size_t u = 0; u < plan_.model_.units().size(); ++u) {
      std::uint64_t shard = 0;
      for (const Segment& s : plan_.segments(static_cast<UnitId>(u))) {
        const ParameterClass& kind = plan_.classes_[s.class_index];
        if (kind.train == Train::kYes && s.elements > 0) {
          shard += s.elements / world;
          if (plan_.model_.units()[u].life == GradientLife::kBucket) {
            const std::uint64_t bytes = bytes_of(kind.precision.gradient);
            smallest = smallest == 0 ? bytes : std::min(smallest, bytes);
          }
        }
      }
      if (plan_.model_.units()[u].life == GradientLife::kUntilReady) {
        plan_.reduce_scratch_ = std::max(plan_.reduce_scratch_, shard);
      }
    }
    if (smallest > 0) {
      const std::uint64_t shard = ceil_div(plan_.bucket_bytes_ / smallest, world);
      plan_.reduce_scratch_ = std::max(plan_.reduce_scratch_, round_up(shard, kGranule));
    }
  }

  Plan plan_;
  std::uint64_t granule_ = 0;
};

Plan make_plan(const ModelSpec& model, const Options& options, World world) {
  check_world(world);
  check_options(options);
  check_model(model);
  return PlanBuilder(model, options, world).build();
}

std::span<const Segment> Plan::segments(UnitId unit) const {
  check_id(index(unit), model_.units().size(), "unit");
  const std::uint32_t begin = unit_begin_[index(unit)];
  return std::span(segments_).subspan(begin, unit_begin_[index(unit) + 1] - begin);
}

const Place& Plan::place(ParameterId p) const {
  check_id(index(p), places_.size(), "parameter");
  return places_[index(p)];
}

std::uint64_t Plan::unit_bytes(UnitId unit) const {
  const std::span<const Segment> mine = segments(unit);
  return mine.empty() ? 0
                      : mine.back().unit_bytes_at +
                            mine.back().elements *
                                bytes_of(classes_[mine.back().class_index].precision.parameter);
}

std::uint64_t Plan::gradient_bytes(UnitId unit) const {
  const std::span<const Segment> mine = segments(unit);
  if (mine.empty()) {
    return 0;
  }
  const ParameterClass& last = classes_[mine.back().class_index];
  const std::uint64_t own =
      last.train == Train::kYes ? mine.back().elements * bytes_of(last.precision.gradient) : 0;
  return mine.back().gradient_bytes_at + own;
}

std::uint32_t Plan::slot_of(UnitId unit) const {
  check_id(index(unit), model_.units().size(), "unit");
  return options_.stage == Stage::kParameters ? slot_of_unit_[index(unit)] : 0;
}

std::uint32_t Plan::partial_sums() const {
  return options_.numerics == Numerics::kWorldInvariant
             ? static_cast<std::uint32_t>(
                   std::bit_width(static_cast<unsigned>(options_.max_micro_batches)) - 1)
             : 0;
}

std::vector<Extent> Plan::extents(int rank, UnitId unit) const {
  check_rank(*this, rank);
  const auto world = static_cast<std::uint64_t>(world_.shard_ranks);
  std::vector<Extent> result;
  for (const Segment& s : segments(unit)) {
    const std::uint64_t shard = s.elements / world;
    const std::uint64_t begin = static_cast<std::uint64_t>(rank) * shard;
    for_each_run(*this, s, begin, begin + shard, [&](const Run& run) {
      result.push_back({.parameter = run.parameter,
                        .first = run.begin - run.origin,
                        .count = run.end - run.begin,
                        .offset = s.offset / world + run.begin - begin});
    });
  }
  return result;
}

}  // namespace zero
