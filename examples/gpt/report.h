// What a run says: log lines, progress, the table of memory and the last line.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <vector>

#include "gpt/run.h"

namespace gpt {

struct StepReport {
  std::size_t step = 0;
  double loss = 0, grad_norm = 0, lr = 0;
  bool applied = false;
  double step_ms = 0;
};

struct Outcome {
  std::vector<double> tokens_per_second;  // by step
  std::optional<double> first_loss, last_loss;
  std::size_t skipped = 0;  // steps whose gradient was not finite
  std::uint64_t state_hash = 0;
};

// Used by rank 0 only.
class Reporter {
 public:
  explicit Reporter(Run& run) : run_(run) {}
  // A line of the log; a line of progress when a second has gone by since the last one.
  void step(const StepReport& report);
  void sample(const std::vector<std::uint8_t>& text) const;
  void finish(std::uint64_t state_hash) { outcome_.state_hash = state_hash; }
  [[nodiscard]] const Outcome& outcome() const { return outcome_; }

 private:
  void write_log(const StepReport& report, double tokens_per_second);
  void print_progress(const StepReport& report, double tokens_per_second);

  Run& run_;
  Outcome outcome_;
  double elapsed_ms_ = 0;
  std::optional<std::chrono::steady_clock::time_point> printed_;
};

// Bytes planned, measured and by the formula, by category and rank; then the last line.
void print_memory_table(const Run& run);
void print_last_line(const Run& run, const Outcome& outcome);

}  // namespace gpt
