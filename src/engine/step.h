// The step: what follows the last ready(), enqueued on the engine stream without a host wait.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/arrays.h"
#include "engine/context.h"
#include "engine/gather.h"
#include "engine/micro_batches.h"
#include "engine/reducer.h"

namespace zero {

// Shared by the engine stream, which fills it, and the user, who may wait for it or not.
struct StepState {
  Context* context = nullptr;  // null when the optimizer is gone: `event` has been reached then
  Event event;
  StepScalars scalars;
  bool filled = false;
  std::exception_ptr error;  // why it will never be filled, known when the optimizer goes
  std::chrono::steady_clock::time_point begin, end;
  std::uint64_t wire_bytes = 0;
};

class Stepper {
 public:
  struct Parts {
    Arrays& arrays;
    Gather& gather;
    MicroBatches& micro_batches;
    Reducer& reducer;
  };
  Stepper(Context& context, Parts parts);
  Stepper(const Stepper&) = delete;
  Stepper& operator=(const Stepper&) = delete;
  ~Stepper();  // reaches every outstanding PendingStep

  // Requires: every micro-batch is complete, no lease is open
  std::shared_ptr<StepState> enqueue(const StepOptions& options);

  [[nodiscard]] const Hyper& hyper(GroupId group) const { return hypers_[index(group)]; }
  void set(GroupId group, const Hyper& hyper) { hypers_[index(group)] = hyper; }
  void mark_begin();  // of the step's first micro-batch, for StepResult::step_ms

 private:
  // What one step sends to the device before anything else.
  struct Message {
    std::vector<std::int64_t> control;
    StepInputs inputs;
    std::vector<Hyper> groups;
  };
  [[nodiscard]] Message message(const StepOptions& options) const;
  [[nodiscard]] std::string label(const Message& message) const;
  void send(Message message);
  void measure_and_update(const std::string& label);
  void refresh_replicas();
  std::shared_ptr<StepState> enqueue_result();

  Context& context_;
  Parts parts_;
  std::vector<Hyper> hypers_;
  Buffer staging_, result_;  // page-locked; the engine stream orders their reuse
  std::vector<Transfer> transfers_;
  std::vector<std::weak_ptr<StepState>> outstanding_;
  std::chrono::steady_clock::time_point begin_;
  bool begun_ = false;
  std::uint64_t wire_bytes_at_begin_ = 0;
};

}  // namespace zero
