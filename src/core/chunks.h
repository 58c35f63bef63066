// Cuts segments into runs of one parameter, and runs into rows of the chunk table.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "zero/plan.h"
#include "zero/update_arguments.h"

#include "core/checked.h"

namespace zero {

// Elements [begin, end) of a segment that belong to one parameter, which starts at `origin`.
struct Run {
  ParameterId parameter{};
  std::uint64_t begin = 0, end = 0, origin = 0;
};

// Calls fn(Run) for each parameter with elements in [begin, end) of the segment, in order.
template <class Fn>
void for_each_run(const Plan& plan, const Segment& segment, std::uint64_t begin, std::uint64_t end,
                  Fn&& fn) {
  const std::span<const ParameterId> layout = plan.layout().subspan(segment.first, segment.count);
  const auto end_of = [&](ParameterId p) {
    return plan.place(p).offset + plan.model().parameters()[index(p)].count;
  };
  const auto first = std::partition_point(layout.begin(), layout.end(),
                                          [&](auto p) { return end_of(p) <= begin; });
  for (auto p = first; p != layout.end() && plan.place(*p).offset < end; ++p) {
    const std::uint64_t origin = plan.place(*p).offset;
    const Run run{*p, std::max(begin, origin), std::min(end, end_of(*p)), origin};
    if (run.begin < run.end) {
      fn(run);
    }
  }
}

// Where this rank's arrays of a segment's class hold its elements.
struct ArrayPlace {
  const Segment& segment;
  Stage stage{};
  std::uint64_t world = 1, rank = 0;

  [[nodiscard]] std::uint64_t shard() const { return segment.elements / world; }
  // Requires: an element of the rank's own shard where arrays are sharded from `since` on
  [[nodiscard]] std::uint64_t at(std::uint64_t element, Stage since) const {
    return stage >= since ? segment.offset / world + element - rank * shard()
                          : segment.offset + element;
  }
};

// Calls fn(Chunk) for the rows of a run.
template <class Fn>
void cut_into_chunks(const ArrayPlace& place, const Run& run, Fn&& fn) {
  for (std::uint64_t at = run.begin; at < run.end; at += kChunkElements) {
    fn(Chunk{.parameter_at = place.at(at, Stage::kParameters),
             .gradient_at = place.at(at, Stage::kGradients),
             .state_at = place.at(at, Stage::kStates),
             .first = at - run.origin,
             .count = static_cast<std::uint32_t>(std::min(kChunkElements, run.end - at)),
             .parameter = static_cast<std::uint32_t>(run.parameter)});
  }
}

// Calls fn(Run) for the parts of a run that lie in each rank's shard, in order.
template <class Fn>
void cut_at_shards(const Run& run, std::uint64_t shard, Fn&& fn) {
  for (std::uint64_t begin = run.begin; begin < run.end;) {
    const std::uint64_t end = std::min(run.end, (begin / shard + 1) * shard);
    fn(Run{run.parameter, begin, end, run.origin});
    begin = end;
  }
}

// Calls fn(Chunk, bool own) for the rows of one class's chunk table: first the rank's own part;
// at stage 0, where every rank updates everything, then the own parts of all other ranks.
template <class Fn>
void for_each_chunk(const Plan& plan, int rank, std::uint32_t class_index, Fn&& fn) {
  const auto for_each_place = [&](auto&& visit) {
    for (const Segment& s : plan.segments()) {
      if (s.class_index == class_index) {
        visit(ArrayPlace{s, plan.options().stage,
                         static_cast<std::uint64_t>(plan.world().shard_ranks),
                         static_cast<std::uint64_t>(rank)});
      }
    }
  };
  for_each_place([&](const ArrayPlace& place) {
    const std::uint64_t begin = place.rank * place.shard();
    for_each_run(plan, place.segment, begin, begin + place.shard(), [&](const Run& run) {
      cut_into_chunks(place, run, [&](const Chunk& chunk) { fn(chunk, true); });
    });
  });
  if (plan.options().stage != Stage::kReplicated) {
    return;
  }
  for_each_place([&](const ArrayPlace& place) {
    for_each_run(plan, place.segment, 0, place.segment.elements, [&](const Run& all) {
      cut_at_shards(all, place.shard(), [&](const Run& run) {
        if (run.begin / place.shard() != place.rank) {
          cut_into_chunks(place, run, [&](const Chunk& chunk) { fn(chunk, false); });
        }
      });
    });
  });
}

}  // namespace zero
