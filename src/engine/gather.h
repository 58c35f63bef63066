// Parameter leases: views at stages 0-2; at stage 3 gathers into slots, ahead of need where the
// recorded order foretells it.
#pragma once

#include <array>
#include <optional>
#include <vector>

#include "engine/arrays.h"
#include "engine/context.h"

namespace zero {

enum class Pass : std::uint8_t { kForward, kBackward };

class Gather {
 public:
  Gather(Context& context, Arrays& arrays);
  Gather(const Gather&) = delete;
  Gather& operator=(const Gather&) = delete;
  ~Gather();  // waits for those who read parameters under leases that have ended

  // Throws: UsageError when the unit's slot holds another unit's open lease
  void open(UnitId unit, StreamRef stream);
  void used_on(UnitId unit, StreamRef stream);
  void close(UnitId unit, StreamRef stream);
  [[nodiscard]] const void* data(UnitId unit, ParameterId parameter, DType dtype) const;

  // An order is recorded from here on; `kind` says which one foretells it.
  void begin_pass(Pass kind);
  // A unit with an open lease, if any.
  [[nodiscard]] std::optional<UnitId> open_unit() const;

  // ---- for the step and for whoever rewrites parameters
  // The engine stream waits for every reader of parameters so far.
  void order_after_readers();
  // Gathered copies are stale from here on; the next pass is a forward one.
  void invalidate();
  // Stages 0-2: from which point of the engine stream on the unit's parameters may be read.
  void set_ready(UnitId unit, const Event& event) { ready_[index(unit)] = event; }
  // Stage 3: gathers now, for nobody in particular (export).
  void take_slot(UnitId unit);

 private:
  struct SlotState {
    std::optional<UnitId> unit;  // whose parameters it holds, or will when `gathered` is reached
    bool prefetched = false;     // and nobody has leased it yet
    int open_leases = 0;
    Event gathered;
    StreamPoints readers;
    std::optional<UnitId> awaited;  // a prefetch that waits for the open lease to end
  };
  void follow_order(UnitId unit);
  void prefetch_next();
  void prefetch(UnitId unit);
  void gather(SlotState& slot, UnitId unit);
  [[nodiscard]] SlotState& slot_of(UnitId unit) { return slots_[context_.plan.slot_of(unit)]; }

  Context& context_;
  Arrays& arrays_;
  std::vector<int> open_leases_;  // by unit
  std::vector<Event> ready_;      // by unit
  StreamPoints readers_;          // stages 0-2
  std::vector<SlotState> slots_;  // stage 3
  std::vector<std::string> labels_;

  Pass pass_ = Pass::kForward;
  std::array<std::vector<UnitId>, 2> orders_;  // of the last complete pass of each kind
  std::vector<UnitId> recording_;
  std::size_t cursor_ = 0;  // what orders_[pass_] foretells next
  std::vector<Transfer> transfers_;
  std::vector<Event> after_;
};

}  // namespace zero
