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

// Where the arrays of one class hold an element of a segment.
struct ArrayPlace {
  const Segment& segment;
  std::uint64_t shard = 0;  // elements of one shard
  std::uint64_t world = 1, rank = 0;

  [[nodiscard]] std::uint64_t at(std::uint64_t element, bool sharded) const {
    return sharded ? segment.offset / world + element - rank * shard : segment.offset + element;
  }
};

// Calls fn(Chunk, bool own) for the rows of one class's chunk table: first the rank's own part;
// at stage 0, where every rank updates everything, then the own parts of all other ranks.
template <class Fn>
void for_each_chunk(const Plan& plan, int rank, std::uint32_t class_index, Fn&& fn) {
  const Stage stage = plan.options().stage;
  const auto world = static_cast<std::uint64_t>(plan.world().shard_ranks);
  const auto me = static_cast<std::uint64_t>(rank);
  const auto cut = [&](const ArrayPlace& place, const Run& run, bool own) {
    for (std::uint64_t at = run.begin; at < run.end; at += kChunkElements) {
      fn(Chunk{.parameter_at = place.at(at, stage >= Stage::kParameters),
               .gradient_at = place.at(at, stage >= Stage::kGradients),
               .state_at = place.at(at, stage >= Stage::kStates),
               .first = at - run.origin,
               .count = static_cast<std::uint32_t>(std::min(kChunkElements, run.end - at)),
               .parameter = static_cast<std::uint32_t>(run.parameter)},
         own);
    }
  };
  const auto visit = [&](bool own) {
    for (const Segment& s : plan.segments()) {
      if (s.class_index != class_index || s.elements == 0) {
        continue;
      }
      const ArrayPlace place{s, s.elements / world, world, me};
      if (own) {
        for_each_run(plan, s, me * place.shard, (me + 1) * place.shard,
                     [&](const Run& run) { cut(place, run, true); });
        continue;
      }
      for_each_run(plan, s, 0, s.elements, [&](const Run& all) {
        for (std::uint64_t r = all.begin / place.shard; r * place.shard < all.end; ++r) {
          if (r != me) {
            cut(place,
                {all.parameter, std::max(all.begin, r * place.shard),
                 std::min(all.end, (r + 1) * place.shard), all.origin},
                false);
          }
        }
      });
    }
  };
  visit(true);
  if (stage == Stage::kReplicated) {
    visit(false);
  }
}

}  // namespace zero
