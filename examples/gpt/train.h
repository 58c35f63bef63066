// One rank's part of a run: the training loop.
#pragma once

#include "zero/communicator.h"

#include "gpt/report.h"
#include "gpt/run.h"

namespace gpt {

// s < warmup: lr (s + 1) / warmup; then a cosine from lr to min_lr_ratio * lr.
[[nodiscard]] double learning_rate(const Settings& settings, std::size_t step);

// Called by all ranks. `reporter` is rank 0's.
void train(Run& run, zero::Communicator& ranks, Reporter& reporter);

}  // namespace gpt
