// What the command line of gpt_train says, checked.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "zero/options.h"
#include "zero/update_rule.h"

#include "gpt/shape.h"
#include "gpt/workspace.h"

namespace gpt {

// The run cannot start as asked: one line, and exit code 2.
class Refusal : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Settings {
  Shape shape;
  std::size_t micro_batches = 1, steps = 20, warmup = 10;
  int ranks = 1, threads = 1;
  zero::Stage stage = zero::Stage::kReplicated;
  zero::Numerics numerics = zero::Numerics::kFast;
  Element element = Element::kFloat32;
  Keep keep = Keep::kActivations;
  zero::Hyper hyper;
  double min_lr_ratio = 0.1, clip = 1;
  std::uint64_t seed = 1;
  std::optional<std::uint64_t> device_bytes;
  std::size_t bucket_bytes = 0, live_units = 2;
  std::vector<std::string> data;  // empty: the King James Bible
  std::optional<std::string> init, save, log;
  std::size_t sample_bytes = 0, sample_every = 0;

  [[nodiscard]] std::size_t ranks_count() const { return static_cast<std::size_t>(ranks); }
  [[nodiscard]] std::size_t sequences() const {
    return shape.micro_batch * micro_batches * ranks_count();
  }
  [[nodiscard]] std::size_t tokens_per_step() const { return sequences() * shape.sequence; }
  [[nodiscard]] WorkspaceOptions workspace() const {
    return {.keep = keep, .element = element, .threads = static_cast<std::size_t>(threads)};
  }
};

// Nothing: help was asked for and printed.
// Throws: Refusal that names the option, what was expected and what was found
[[nodiscard]] std::optional<Settings> parse_settings(int argc, const char* const* argv);

// "1024", "256KiB", "3MiB", "2GiB"; nothing for anything else.
[[nodiscard]] std::optional<std::uint64_t> parse_bytes(const std::string& text);

}  // namespace gpt
