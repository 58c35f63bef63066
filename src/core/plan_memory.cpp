// Bytes that a plan needs, sends and would need by the formula.
#include <algorithm>
#include <string>
#include <vector>

#include "zero/plan.h"
#include "zero/update_arguments.h"

#include "core/checked.h"
#include "core/chunks.h"
#include "core/plan_check.h"

namespace zero {
namespace {

constexpr std::uint64_t kFloatBytes = sizeof(float);

std::uint64_t rows_of(std::uint64_t elements) {
  return ceil_div(elements, kChunkElements);
}

bool is_sharded(const Plan& plan, Category category) {
  switch (category) {
    case Category::kParameters:
      return plan.options().stage >= Stage::kParameters;
    case Category::kGradients:
      return plan.options().stage >= Stage::kGradients;
    default:
      return plan.options().stage >= Stage::kStates;
  }
}

// Bytes that one element of a class costs in a category, on the rank that has it.
std::uint64_t formula_size(const ParameterClass& kind, Category category) {
  if (category == Category::kParameters) {
    return bytes_of(kind.precision.parameter);
  }
  if (kind.train == Train::kFrozen) {
    return 0;
  }
  switch (category) {
    case Category::kGradients:
      return kFloatBytes;
    case Category::kMaster:
      return kind.precision.master == Master::kFloat32 ? kFloatBytes : 0;
    case Category::kStates: {
      std::uint64_t size = 0;
      for (const StateSpec& state : kind.rule.states) {
        size += bytes_of(state.dtype);
      }
      return size;
    }
    default:
      return 0;
  }
}

// What one rank has of one class.
struct ClassCounts {
  std::uint64_t real_all = 0, real_own = 0;  // elements without padding
  Plan::ChunkCounts rows;
};

// Rows for a parameter's elements [begin, end) of a segment cut at every shard border; O(1).
std::uint64_t rows_of_all_shards(std::uint64_t begin, std::uint64_t end, std::uint64_t shard) {
  const std::uint64_t first = begin / shard, last = (end - 1) / shard;
  if (first == last) {
    return rows_of(end - begin);
  }
  return rows_of((first + 1) * shard - begin) + (last - first - 1) * rows_of(shard) +
         rows_of(end - last * shard);
}

void count_segment(const Plan& plan, int rank, const Segment& s, ClassCounts& counts) {
  const std::uint64_t shard = s.elements / static_cast<std::uint64_t>(plan.world().shard_ranks);
  const std::uint64_t begin = static_cast<std::uint64_t>(rank) * shard;
  for_each_run(plan, s, begin, begin + shard, [&](const Run& run) {
    counts.real_own += run.end - run.begin;
    counts.rows.own += rows_of(run.end - run.begin);
  });
  const bool updates_all = plan.options().stage == Stage::kReplicated;
  for_each_run(plan, s, 0, s.elements, [&](const Run& run) {
    counts.real_all += run.end - run.begin;
    counts.rows.updated += updates_all ? rows_of_all_shards(run.begin, run.end, shard) : 0;
  });
}

std::vector<ClassCounts> count_classes(const Plan& plan, int rank) {
  std::vector<ClassCounts> counts(plan.classes().size());
  for (const Segment& s : plan.segments()) {
    count_segment(plan, rank, s, counts[s.class_index]);
  }
  for (ClassCounts& c : counts) {
    c.rows.updated = plan.options().stage == Stage::kReplicated ? c.rows.updated : c.rows.own;
  }
  return counts;
}

// Collects the table's lines: one a name and category, padding gathered in a line of its own.
class Items {
 public:
  Items(const Plan& plan, int rank) : plan_(plan), counts_(count_classes(plan, rank)) {}

  [[nodiscard]] std::vector<PlanItem> build() {
    for (std::size_t c = 0; c < counts_.size(); ++c) {
      add_array(c, "parameters", Category::kParameters,
                bytes_of(plan_.classes()[c].precision.parameter));
    }
    for_each_trained([&](std::size_t c, const ParameterClass&) {
      add_array(c, "gradients", Category::kGradients, kFloatBytes);
    });
    for_each_trained([&](std::size_t c, const ParameterClass& kind) {
      if (kind.precision.master == Master::kFloat32) {
        add_array(c, "master weights", Category::kMaster, kFloatBytes);
      }
    });
    for_each_trained([&](std::size_t c, const ParameterClass& kind) {
      for (const StateSpec& state : kind.rule.states) {
        add_array(c, state.name, Category::kStates, bytes_of(state.dtype));
      }
    });
    add({"padding", Category::kPadding, false, padding_});
    add_buffers();
    add_tables();
    for (const ModelSpec::UserBytes& user : plan_.model().user_bytes()) {
      add({user.name, Category::kUser, false, user.bytes});
    }
    return std::move(items_);
  }

 private:
  template <class Fn>
  void for_each_trained(Fn&& fn) const {
    for (std::size_t c = 0; c < counts_.size(); ++c) {
      if (plan_.classes()[c].train == Train::kYes) {
        fn(c, plan_.classes()[c]);
      }
    }
  }

  [[nodiscard]] std::uint64_t world() const {
    return static_cast<std::uint64_t>(plan_.world().shard_ranks);
  }

  void add(PlanItem item) {
    const auto same = std::find_if(items_.begin(), items_.end(), [&](const PlanItem& other) {
      return other.category == item.category && other.name == item.name;
    });
    if (same != items_.end()) {
      same->bytes = checked_add(same->bytes, item.bytes);
    } else if (item.bytes > 0) {
      items_.push_back(std::move(item));
    }
  }

  void add_array(std::size_t c, const std::string& name, Category category, std::uint64_t size) {
    const bool sharded = is_sharded(plan_, category);
    const std::uint64_t all = plan_.classes()[c].elements;
    const std::uint64_t elements = sharded ? all / world() : all;
    const std::uint64_t real = sharded ? counts_[c].real_own : counts_[c].real_all;
    add({name, category, false, checked_mul(real, size)});
    padding_ = checked_add(padding_, checked_mul(elements - real, size));
  }

  void add_buffers() {
    std::uint64_t live = 0;
    for (const Slot& slot : plan_.slots()) {
      live += slot.bytes;
    }
    add({"live units", Category::kLiveUnits, true, live});
    add({"gradient buckets", Category::kBuckets, true,
         checked_mul(plan_.bucket_buffer_bytes(),
                     static_cast<std::uint64_t>(plan_.options().buckets))});
    std::uint64_t until_ready = 0;
    for (std::size_t u = 0; u < plan_.model().units().size(); ++u) {
      if (plan_.model().units()[u].life == GradientLife::kUntilReady) {
        until_ready = checked_add(until_ready, plan_.gradient_bytes(static_cast<UnitId>(u)));
      }
    }
    add({"until-ready gradients", Category::kBuckets, true,
         checked_mul(until_ready,
                     static_cast<std::uint64_t>(plan_.options().max_open_micro_batches))});
    add({"reduce scratch", Category::kScratch, true,
         checked_mul(plan_.reduce_scratch_elements(), kFloatBytes)});
    std::uint64_t level = 0;
    for_each_trained([&](std::size_t, const ParameterClass& kind) {
      level = checked_add(level, kind.elements / world());
    });
    add({"partial sums", Category::kScratch, true,
         checked_mul(checked_mul(level, plan_.partial_sums()), kFloatBytes)});
  }

  void add_tables() {
    const ModelSpec& model = plan_.model();
    std::uint64_t bytes = 0;
    for_each_trained([&](std::size_t c, const ParameterClass&) {
      bytes = checked_add(bytes, checked_mul(counts_[c].rows.updated, sizeof(Chunk)));
    });
    bytes = checked_add(bytes, model.parameters().size() * sizeof(ParameterRow));
    bytes = checked_add(bytes, model.groups().size() * sizeof(Hyper));
    bytes = checked_add(bytes, sizeof(StepInputs) + sizeof(StepScalars));
    bytes = checked_add(
        bytes, ControlLayout::words(world(), model.parameters().size()) * sizeof(std::int64_t));
    add({"tables", Category::kScratch, false, bytes});
  }

  const Plan& plan_;
  std::vector<ClassCounts> counts_;
  std::vector<PlanItem> items_;
  std::uint64_t padding_ = 0;
};

template <class Keep>
std::uint64_t sum_of(const std::vector<PlanItem>& items, Keep&& keep) {
  std::uint64_t bytes = 0;
  for (const PlanItem& item : items) {
    bytes = keep(item) ? checked_add(bytes, item.bytes) : bytes;
  }
  return bytes;
}

// From rank `rank` on, the chunk tables have `rows` more rows (modulo 2^64: fewer).
struct RowChange {
  std::uint64_t rank = 0, rows = 0;
};

void add_changes(std::vector<RowChange>& changes, const Run& run, std::uint64_t shard) {
  const std::uint64_t first = run.begin / shard, last = (run.end - 1) / shard;
  std::uint64_t before = 0;
  const auto from = [&](std::uint64_t rank, std::uint64_t rows) {
    changes.push_back({rank, rows - before});
    before = rows;
  };
  from(first, rows_of(std::min(run.end, (first + 1) * shard) - run.begin));
  if (last > first + 1) {
    from(first + 1, rows_of(shard));
  }
  if (last > first) {
    from(last, rows_of(run.end - last * shard));
  }
  from(last + 1, 0);
}

}  // namespace

Plan::ChunkCounts Plan::chunk_counts(int rank, std::uint32_t class_index) const {
  check_rank(*this, rank);
  check_id(class_index, classes_.size(), "class");
  return count_classes(*this, rank)[class_index].rows;
}

// At stage 0 every table holds all ranks' rows, so that all are equal. Above, the rows of a rank
// change only at the few ranks where a parameter begins or ends: those are sorted and swept.
int Plan::fullest_rank() const {
  if (options_.stage == Stage::kReplicated || world_.shard_ranks == 1) {
    return 0;
  }
  std::vector<RowChange> changes;
  changes.reserve(layout_.size() * 3);
  for (const Segment& s : segments_) {
    if (classes_[s.class_index].train == Train::kYes) {
      const std::uint64_t shard = s.elements / static_cast<std::uint64_t>(world_.shard_ranks);
      for_each_run(*this, s, 0, s.elements,
                   [&](const Run& run) { add_changes(changes, run, shard); });
    }
  }
  std::sort(changes.begin(), changes.end(),
            [](const RowChange& a, const RowChange& b) { return a.rank < b.rank; });
  std::uint64_t rows = 0, most = 0, fullest = 0;
  for (std::size_t i = 0; i < changes.size(); ++i) {
    rows += changes[i].rows;
    const bool complete = i + 1 == changes.size() || changes[i + 1].rank != changes[i].rank;
    if (complete && rows > most) {
      most = rows;
      fullest = changes[i].rank;
    }
  }
  return static_cast<int>(fullest);
}

std::vector<PlanItem> Plan::items(int rank) const {
  check_rank(*this, rank);
  return Items(*this, rank).build();
}

std::uint64_t Plan::bytes(Category category, int rank) const {
  return sum_of(items(rank), [&](const PlanItem& item) { return item.category == category; });
}

std::uint64_t Plan::persistent_bytes(int rank) const {
  return sum_of(items(rank), [](const PlanItem& item) { return !item.transient; });
}

std::uint64_t Plan::peak_bytes(int rank) const {
  return sum_of(items(rank), [](const PlanItem&) { return true; });
}

// A collective over W*n elements sends (W-1)*n from each rank; an all-reduce twice that.
std::uint64_t Plan::wire_bytes_per_step(int micro_batches) const {
  require(micro_batches >= 1, "micro_batches: expected at least 1, found " +
                                  std::to_string(micro_batches) + "; a step has one or more");
  const auto world = static_cast<std::uint64_t>(world_.shard_ranks);
  const auto micro = static_cast<std::uint64_t>(micro_batches);
  const bool once = options_.stage <= Stage::kStates && options_.numerics == Numerics::kFast;
  std::uint64_t bytes = 0;
  for (const ParameterClass& kind : classes_) {
    const std::uint64_t sent = checked_mul(kind.elements / world, world - 1);
    const std::uint64_t gather = checked_mul(sent, bytes_of(kind.precision.parameter));
    if (options_.stage == Stage::kParameters) {
      bytes = checked_add(bytes, checked_mul(gather, 2 * micro));
    }
    if (kind.train == Train::kFrozen) {
      continue;
    }
    // Micro-batches that were summed before they are sent are sent in fp32.
    const std::uint64_t size = once && micro > 1 ? kFloatBytes : bytes_of(kind.precision.gradient);
    bytes = checked_add(bytes, checked_mul(checked_mul(sent, size), once ? 1 : micro));
    if (options_.stage == Stage::kReplicated) {
      bytes = checked_add(bytes, checked_mul(sent, kFloatBytes));
    } else if (options_.stage <= Stage::kGradients) {
      bytes = checked_add(bytes, gather);
    }
  }
  const std::uint64_t control =
      ControlLayout::words(world, model_.parameters().size()) * sizeof(std::int64_t);
  return checked_add(bytes, 2 * control * (world - 1) / world);
}

std::uint64_t Plan::parameter_count() const {
  std::uint64_t count = 0;
  for (const ModelSpec::Parameter& p : model_.parameters()) {
    count += p.count;
  }
  return count;
}

std::uint64_t Plan::trained_count() const {
  std::uint64_t count = 0;
  for (const ModelSpec::Parameter& p : model_.parameters()) {
    count += model_.groups()[index(p.group)].options.train == Train::kYes ? p.count : 0;
  }
  return count;
}

std::uint64_t Plan::formula_bytes(Category category) const {
  std::uint64_t bytes = 0;
  for (std::size_t p = 0; p < places_.size(); ++p) {
    const ParameterClass& kind = classes_[segments_[places_[p].segment].class_index];
    bytes =
        checked_add(bytes, checked_mul(model_.parameters()[p].count, formula_size(kind, category)));
  }
  return is_sharded(*this, category)
             ? ceil_div(bytes, static_cast<std::uint64_t>(world_.shard_ranks))
             : bytes;
}

}  // namespace zero
