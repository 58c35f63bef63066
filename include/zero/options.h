// Every choice of a run, with its default, meaning and cost.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace zero {

// What is partitioned over the ranks.
enum class Stage : std::uint8_t {
  kReplicated = 0,  // nothing: plain data parallel
  kStates = 1,      // optimizer states and master weights
  kGradients = 2,   // + gradients
  kParameters = 3,  // + parameters
};

// In which order gradients of several micro-batches and ranks are summed; design, "Numbers".
enum class Numerics : std::uint8_t {
  kFast,            // fewest bytes on the wire; same bits within stages {0,1} and within {2,3}
  kStageInvariant,  // same bits at all stages; stages 0 and 1 reduce after every micro-batch
  kWorldInvariant,  // same bits at any power-of-two world for the same global micro-batches
};

enum class Transport : std::uint8_t { kLocal, kMpi, kNccl };

struct World {
  int shard_ranks = 1;      // over which the state is partitioned
  int replicate_ranks = 1;  // 1 for now; other values are refused
  Transport transport = Transport::kLocal;
  friend bool operator==(const World&, const World&) = default;
};

struct Options {
  // ---- affects behaviour
  Stage stage = Stage::kReplicated;
  Numerics numerics = Numerics::kFast;
  std::optional<double>
      clip_norm{};  // global norm; none: gradients are not clipped (norm is still measured)
  int max_open_micro_batches =
      1;  // open at once (1F1B); each kUntilReady unit costs a gradient buffer for each
  int max_micro_batches = 1;  // binds kWorldInvariant only: floor(log2) more fp32 gradient shards
  std::chrono::milliseconds deadline{600'000};  // of communication, never of the user's own kernels

  // ---- affects performance and memory only (bits do not depend on them)
  int live_units =
      2;  // units gathered at once at stage 3; 2 lets a gather run while its predecessor is used
  int buckets = 2;  // gradient buffers in flight
  std::size_t bucket_bytes =
      25U << 20;  // gradient bytes moved by one grouped call, whole units only

  friend bool operator==(const Options&, const Options&) = default;
};

[[nodiscard]] std::string_view name_of(Numerics);

}  // namespace zero
