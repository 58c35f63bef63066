// Reads and writes the values of parameters, masters, states and gradients, from the host.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/arrays.h"
#include "engine/context.h"
#include "engine/gather.h"

namespace zero {

class ValueAccess {
 public:
  ValueAccess(Context& context, Arrays& arrays, Gather& gather);

  // Writes this rank's W-th part of every parameter from `fill`, and refreshes all replicas.
  void overwrite(const Fill& fill);
  void visit_own(Values values, const Visit& visit) const;
  void visit_own_state(const std::string& state, const Visit& visit) const;
  void visit_all(Values values, const Visit& visit, int root);
  [[nodiscard]] std::uint64_t state_hash() const;
  [[nodiscard]] std::int64_t step_count(ParameterId parameter) const;

 private:
  // An array of a segment, and how to read it as fp32.
  struct Source {
    const std::byte* own = nullptr;   // this rank's shard; null: the segment has no such value
    const std::byte* full = nullptr;  // null: it is sharded
    DType dtype = DType::kFloat32;
    double divisor = 1;
  };
  [[nodiscard]] Source source(Values values, const Segment& segment, double divisor) const;
  [[nodiscard]] double divisor() const;
  void write_own(const Fill& fill, const Extent& extent);
  void refresh_replicas();
  // Calls `visit` for elements [first, first + count) of the segment, which lie at `data`.
  void visit_range(const Segment& segment, std::uint64_t first, std::uint64_t count,
                   const Source& source, const Visit& visit) const;
  void gather_and_visit(const Segment& segment, const Source& source, const Visit* visit);
  void read(std::vector<float>& out, const std::byte* from, DType dtype, double divisor) const;
  [[nodiscard]] std::uint64_t hash_own(const std::string& parameter, const std::string& array,
                                       const Extent& extent, const std::byte* data,
                                       std::size_t size) const;

  Context& context_;
  Arrays& arrays_;
  Gather& gather_;
  std::vector<Transfer> transfers_;
};

}  // namespace zero
