#include "gpt/train.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <numbers>
#include <vector>

#include "zero/optimizer.h"

#include "gpt/data.h"
#include "gpt/gpt.h"
#include "gpt/pool.h"
#include "gpt/sample.h"
#include "gpt/weights.h"
#include "gpt/workspace.h"

namespace gpt {
namespace {

class Trainer {
 public:
  Trainer(Run& run, zero::Communicator& ranks, Reporter& reporter)
      : run_(run),
        settings_(run.settings),
        ranks_(ranks),
        reporter_(reporter),
        device_(*run.devices[static_cast<std::size_t>(ranks.rank())]),
        pool_(settings_.threads),
        workspace_(settings_.shape, settings_.workspace(), device_),
        optimizer_(run.plan, device_, {ranks}),
        gpt_(settings_.shape, run.model, workspace_, optimizer_, pool_),
        batches_(settings_, run.text, ranks.rank()),
        losses_(settings_.micro_batches) {}

  void run() {
    initialize(optimizer_, run_.model.spec, settings_);
    for (std::size_t step = 0; step < settings_.steps; ++step) {
      take_step(step);
      const bool last = step + 1 == settings_.steps;
      if (!last && settings_.sample_every > 0 && (step + 1) % settings_.sample_every == 0) {
        show_sample();
      }
    }
    show_sample();
    const std::uint64_t hash = optimizer_.state_hash();
    if (ranks_.rank() == 0) {
      reporter_.finish(hash);
    }
    if (settings_.save.has_value()) {
      save_weights(optimizer_, run_.model.spec, *settings_.save, ranks_.rank());
    }
  }

 private:
  void take_step(std::size_t step) {
    const auto start = std::chrono::steady_clock::now();
    const double lr = learning_rate(settings_, step);
    set_learning_rate(lr);
    for (std::size_t m = 0; m < settings_.micro_batches; ++m) {
      const Tokens tokens = batches_.micro_batch(step, m);
      losses_[m] = gpt_.forward(tokens);
      const bool last = m + 1 == settings_.micro_batches;
      auto micro = optimizer_.begin_micro_batch({last ? zero::Last::kYes : zero::Last::kNo});
      gpt_.backward(tokens.inputs, micro);
    }
    const zero::StepResult result = optimizer_.step().get();
    const double loss = mean_loss();
    const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - start;
    if (ranks_.rank() == 0) {
      reporter_.step({.step = step,
                      .loss = loss,
                      .grad_norm = result.grad_norm,
                      .lr = lr,
                      .applied = result.applied,
                      .step_ms = time.count()});
    }
  }

  void set_learning_rate(double lr) {
    for (const zero::GroupId group : {run_.model.decay, run_.model.no_decay}) {
      zero::Hyper hyper = optimizer_.hyper(group);
      hyper.lr = lr;
      optimizer_.set(group, hyper);
    }
  }

  // Over the global batch, added in order of the global micro-batch index.
  [[nodiscard]] double mean_loss() const {
    const auto all = ranks_.bootstrap().all_gather(std::as_bytes(std::span(losses_)),
                                                   run_.plan.options().deadline);
    double sum = 0;
    for (std::size_t m = 0; m < losses_.size(); ++m) {
      for (const auto& bytes : all) {
        double loss = 0;
        std::memcpy(&loss, bytes.data() + m * sizeof loss, sizeof loss);
        sum += loss;
      }
    }
    return sum / static_cast<double>(losses_.size() * all.size());
  }

  // All ranks compute the same bytes, since at stage 3 each pass gathers.
  void show_sample() {
    if (settings_.sample_bytes == 0) {
      return;
    }
    const std::vector<std::uint8_t> text =
        sample(gpt_, settings_.shape, settings_.sample_bytes, settings_.seed);
    if (ranks_.rank() == 0) {
      reporter_.sample(text);
    }
  }

  Run& run_;
  const Settings& settings_;
  zero::Communicator& ranks_;
  Reporter& reporter_;
  zero::Ledger& device_;
  Pool pool_;
  Workspace workspace_;
  zero::Optimizer optimizer_;
  Gpt gpt_;
  Batches batches_;
  std::vector<double> losses_;  // by micro-batch
};

}  // namespace

double learning_rate(const Settings& s, std::size_t step) {
  const auto at = static_cast<double>(step), warmup = static_cast<double>(s.warmup);
  if (step < s.warmup) {
    return s.hyper.lr * (at + 1) / warmup;
  }
  const double low = s.min_lr_ratio * s.hyper.lr;
  const double span = std::max(1.0, static_cast<double>(s.steps) - warmup);
  return low + 0.5 * (s.hyper.lr - low) * (1 + std::cos(std::numbers::pi * (at - warmup) / span));
}

void train(Run& run, zero::Communicator& ranks, Reporter& reporter) {
  Trainer(run, ranks, reporter).run();
}

}  // namespace gpt
