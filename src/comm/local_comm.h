// Communicator `local`: ranks are threads of one process and read each other's buffers in place.
#pragma once

#include <chrono>
#include <memory>

#include "zero/communicator.h"

#include "comm/room.h"

namespace zero {

class LocalBootstrap final : public Bootstrap {
 public:
  LocalBootstrap(Room& room, int rank) : room_(room), rank_(rank) {}

  [[nodiscard]] std::vector<std::vector<std::byte>> all_gather(
      std::span<const std::byte> mine, std::chrono::milliseconds deadline) override;
  void raise(const std::string& error) noexcept override;
  void check() const override { room_.check(rank_); }

 private:
  Room& room_;
  int rank_;
};

// Used by one host thread of its rank. Collectives run as jobs of the caller's stream: each rank
// publishes its pointers, meets the others, reads what it needs, and meets them again.
class LocalCommunicator final : public Communicator {
 public:
  // `deadline` bounds split.
  LocalCommunicator(std::shared_ptr<Room> room, int rank, std::chrono::milliseconds deadline);
  ~LocalCommunicator() override;  // leaves

  [[nodiscard]] int rank() const override { return rank_; }
  [[nodiscard]] int world() const override { return room_->world(); }
  [[nodiscard]] Transport transport() const override { return Transport::kLocal; }
  [[nodiscard]] Bootstrap& bootstrap() override { return bootstrap_; }
  [[nodiscard]] Buffer allocate(Backend& backend, const Allocation& what) override {
    return backend.allocate(what);
  }

  [[nodiscard]] Event reduce_scatter(std::span<const Transfer>, SumOrder, const On&) override;
  [[nodiscard]] Event all_gather(std::span<const Transfer>, const On&) override;
  [[nodiscard]] Event all_reduce(std::span<const Transfer>, const On&) override;
  [[nodiscard]] Event all_to_all(std::span<const Transfer>, const On&) override;
  [[nodiscard]] std::unique_ptr<Communicator> split(int color, int key) override;
  void abort(const std::string& why) noexcept override;

 private:
  // Makes the rounds of a collective for this rank's transfers; called when the job runs.
  using Rounds = std::vector<Room::Round> (*)(Backend&, int rank, int world);
  [[nodiscard]] Event enqueue(const char* operation, std::span<const Transfer>, SumOrder, const On&,
                              Rounds);

  std::shared_ptr<Room> room_;
  int rank_;
  std::chrono::milliseconds deadline_;
  LocalBootstrap bootstrap_;
  std::uint64_t splits_ = 0;
  int exceptions_;  // under way when it was made: more of them when it goes mean a flight
};

}  // namespace zero
