// Sums gradients over ranks and micro-batches: what a full bucket, and what the step, enqueue.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/arrays.h"
#include "engine/context.h"

namespace zero {

class Reducer {
 public:
  // A unit's gradient of one micro-batch, where its segments start.
  struct Contribution {
    UnitId unit{};
    const std::byte* data = nullptr;
    bool complete = false;  // no further micro-batch of this step will contribute to the unit
  };

  Reducer(Context& context, Arrays& arrays);

  // Adds the contributions to their units' sums, in one grouped collective where ranks meet.
  // Returns: the point from which on the contributions' memory may be written again
  Event add(std::span<const Contribution> contributions, std::span<const Event> after);
  // Everything that was not reduced on the way: after it the gradient is where update reads it.
  void finish(int micro_batches);
  void reset();

  // Micro-batches summed into the unit so far.
  [[nodiscard]] std::uint32_t summed(UnitId unit) const { return summed_[index(unit)]; }

 private:
  // What follows a reduce-scatter on the engine stream.
  struct Addition {
    const Segment* segment = nullptr;
    float* from = nullptr;
    std::uint32_t summed = 0;
  };
  [[nodiscard]] bool reduces_once() const;
  void add_locally(const Contribution& c);
  void add_reduced(const Contribution& c);
  void carry(const Addition& addition);
  void fold_partial_sums(int micro_batches);
  void reduce_late();
  void gather_gradients();
  [[nodiscard]] std::string label(std::span<const Contribution> contributions) const;

  Context& context_;
  Arrays& arrays_;
  std::vector<std::uint32_t> summed_;  // by unit
  std::vector<std::uint8_t> reduced_;  // by unit: its sum over ranks is complete
  std::vector<Transfer> transfers_;
  std::vector<Addition> additions_;
  std::uint64_t scratch_used_ = 0;
};

}  // namespace zero
