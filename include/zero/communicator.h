// Ranks that act together: the data path (collectives on streams) and the host-side bootstrap.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "zero/backend.h"

namespace zero {

// One array of a grouped collective. Shapes are given with each verb; n = count.
struct Transfer {
  const void* in = nullptr;
  void* out = nullptr;
  std::size_t count = 0;
  DType dtype = DType::kFloat32;  // of in
};

enum class SumOrder : std::uint8_t {
  kTransport,  // whatever is fastest
  kTree,       // the binary tree over rank numbers: the same bits on every transport
};

// Where, after what and under what name a collective runs.
struct On {
  Backend& backend;
  StreamRef stream;
  std::span<const Event> after{};
  // What is moved, in words; compared between ranks where they meet, and part of every message.
  std::string_view label{};
  // How long a rank waits for the others once it has come.
  std::chrono::milliseconds deadline{600'000};
};

// The host-side channel: it exists before and after the data path.
class Bootstrap {
 public:
  Bootstrap() = default;
  Bootstrap(const Bootstrap&) = delete;
  Bootstrap& operator=(const Bootstrap&) = delete;
  virtual ~Bootstrap() = default;

  // Collective; blocks the calling thread. Returns every rank's bytes, in order of rank.
  // Throws: CommError when a rank does not come, leaves, or has raised
  [[nodiscard]] virtual std::vector<std::vector<std::byte>> all_gather(
      std::span<const std::byte> mine, std::chrono::milliseconds deadline) = 0;
  // Tells all ranks of an error; every wait of theirs, present or future, throws it. The first
  // one stays.
  virtual void raise(const std::string& error) noexcept = 0;
  // Throws: CommError when some rank has raised; names it
  virtual void check() const = 0;
};

// Every verb enqueues on `on.stream` behind `on.after` and returns an event that marks when `out`
// is ready and `in` may be written again. All ranks call the same verbs in the same order with the
// same counts, dtypes and labels; a difference is a CommError on all ranks that names both sides.
// Throws: UsageError before anything is enqueued; CommError from a later wait.
class Communicator {
 public:
  Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  virtual ~Communicator() = default;

  [[nodiscard]] virtual int rank() const = 0;
  [[nodiscard]] virtual int world() const = 0;
  [[nodiscard]] virtual Transport transport() const = 0;
  [[nodiscard]] virtual Bootstrap& bootstrap() = 0;

  // Memory that the transport may want to own; counted by `backend`. Collective.
  [[nodiscard]] virtual Buffer allocate(Backend& backend, const Allocation&) = 0;

  // Sums in over ranks and leaves this rank's block of the sum in out.
  // Shapes:   in [W*n], out [n]; out may be in's own block when in is fp32 (in place)
  // Wire:     (W-1)/W * bytes(in) sent by each rank
  // Requires: fp32, bf16 or int64 in; out is fp32 (int64 for int64)
  [[nodiscard]] virtual Event reduce_scatter(std::span<const Transfer>, SumOrder, const On&) = 0;
  // Shapes:   in [n], out [W*n]; in may be out's own block (in place)
  // Wire:     (W-1)/W * bytes(out) sent by each rank
  [[nodiscard]] virtual Event all_gather(std::span<const Transfer>, const On&) = 0;
  // Shapes:   in [n], out [n]; in == out is legal. fp32 (tree order) or int64 (exact)
  // Wire:     2 * (W-1)/W * bytes(in)
  [[nodiscard]] virtual Event all_reduce(std::span<const Transfer>, const On&) = 0;
  // Block r of in goes to rank r. Shapes: in [W*n], out [W*n], no overlap
  // Wire:     (W-1)/W * bytes(in)
  [[nodiscard]] virtual Event all_to_all(std::span<const Transfer>, const On&) = 0;

  // Ranks with the same color form a communicator, ordered by (key, rank). Collective, on the host.
  [[nodiscard]] virtual std::unique_ptr<Communicator> split(int color, int key) = 0;
  // Ends all waits of all ranks with CommError(why).
  virtual void abort(const std::string& why) noexcept = 0;

  // How many users were counted before on this rank: users that ranks make in the same order have
  // the same number, so that labels tell them apart.
  [[nodiscard]] int count_user() { return users_++; }

 private:
  int users_ = 0;
};

struct Communicators {
  Communicator& shard;
};

}  // namespace zero
