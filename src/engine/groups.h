// Cuts the model's units, in order, into groups of about bucket_bytes for one grouped collective.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/context.h"

namespace zero {

// `add(segment)` appends a transfer to `transfers` or does not; `flush(first, last)` moves them
// for units first..last and need not clear them.
template <class Add, class Flush>
void in_groups(const Context& context, std::vector<Transfer>& transfers, Add add, Flush flush) {
  transfers.clear();
  std::uint64_t bytes = 0;
  std::size_t first = 0;
  const std::size_t units = context.model().units().size();
  for (std::size_t u = 0; u < units; ++u) {
    for (const Segment& s : context.plan.segments(static_cast<UnitId>(u))) {
      const std::size_t before = transfers.size();
      add(s);
      bytes += transfers.size() > before ? s.elements * bytes_of(transfers.back().dtype) : 0;
    }
    if (!transfers.empty() && (bytes >= context.plan.options().bucket_bytes || u + 1 == units)) {
      flush(static_cast<UnitId>(first), static_cast<UnitId>(u));
      transfers.clear();
      bytes = 0;
      first = u + 1;
    }
  }
}

inline std::string group_label(const Context& context, const char* what, UnitId first,
                               UnitId last) {
  return std::string(what) + " of units '" + context.name(first) + "' to '" + context.name(last) +
         "'";
}

}  // namespace zero
