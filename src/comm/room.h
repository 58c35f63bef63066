// Where the threads that are ranks of one communicator meet, and where their first error stays.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "zero/communicator.h"
#include "zero/error.h"

namespace zero {

// A CommError that another rank caused; run_ranks prefers the cause.
class SecondhandError final : public CommError {
 public:
  using CommError::CommError;
};

// What a rank brings to a meeting. Everything but `bytes` and the pointers must agree.
struct Arrival {
  std::string operation{}, label{};
  std::vector<Transfer> transfers{};
  std::span<const std::byte> bytes{};  // of the bootstrap; lengths may differ
  SumOrder order = SumOrder::kTree;
};

class Room {
 public:
  enum class Channel : std::uint8_t { kData, kBootstrap };
  struct Caller {
    int rank = 0;
    Channel channel = Channel::kData;
    std::uint64_t sequence = 0;
    std::chrono::milliseconds deadline{};
  };
  // One round of a meeting's work; it reads what the others brought. All ranks finish a round
  // before any starts the next, and before anyone leaves: memory stays valid while it is read.
  using Round = std::function<void(std::span<const Arrival>)>;

  explicit Room(int world) : world_(world), issued_(2), left_(static_cast<std::size_t>(world)) {
    for (auto& channel : issued_) {
      channel.resize(static_cast<std::size_t>(world));
    }
  }

  [[nodiscard]] int world() const { return world_; }

  // Takes the number of a rank's next meeting; host thread of the rank, in program order.
  [[nodiscard]] std::uint64_t issue(int rank, Channel channel);

  // Meets the other ranks and runs the rounds.
  // Throws: CommError when the arrivals differ, a rank does not come in time or has left, or the
  //         room has failed; whatever a round threw on this rank
  void meet(const Caller& caller, Arrival arrival, std::span<const Round> rounds);

  // ---- errors: the first one stays
  // `origin` is the rank that caused it, for which alone it is no news.
  static constexpr int kFoundByAll = -1;
  static constexpr int kOutside = std::numeric_limits<int>::max();  // a rank of the parent only
  void fail(const std::string& error, CommError::Facts facts, int origin) noexcept;
  // Throws: CommError when the room has failed
  void check(int rank);
  // The rank will issue nothing more; meetings that still need it fail.
  void leave(int rank) noexcept;

  // The room of the ranks with one color in the split numbered `ordinal`; each of `members` (ranks
  // here, in their order there) asks once.
  [[nodiscard]] std::shared_ptr<Room> child(std::uint64_t ordinal, int color,
                                            std::span<const int> members);

 private:
  struct Meeting {
    std::vector<Arrival> arrivals;      // by rank
    std::vector<std::uint8_t> present;  // by rank
    int arrived = 0;
    bool open = false;                 // all came and agreed: everyone works, whatever fails now
    std::vector<int> rounds_finished;  // by round
    int departed = 0;
    std::string broken;  // why the result is worthless, when a round failed on some rank
    int broken_by = -1;
  };
  using Key = std::pair<Channel, std::uint64_t>;
  using Lock = std::unique_lock<std::mutex>;

  Meeting& enter(Lock& lock, const Caller& caller, Arrival arrival, std::size_t rounds);
  void await_others(Lock& lock, const Caller& caller, Meeting& meeting);
  void work(Lock& lock, const Caller& caller, Meeting& meeting, std::span<const Round> rounds);
  void fail_locked(const std::string& error, CommError::Facts facts, int origin);
  void fail_absent(const Caller& caller, const Meeting& meeting, int absent,
                   const std::string& why);
  [[nodiscard]] int gone_for(const Caller& caller, const Meeting& meeting) const;
  [[nodiscard]] int first_absent(const Meeting& meeting) const;
  void throw_failure(int rank) const;

  const int world_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Key, Meeting> meetings_;
  std::vector<std::vector<std::uint64_t>> issued_;  // by channel, by rank
  std::vector<std::uint8_t> left_;                  // by rank
  bool failed_ = false;
  std::string error_;
  CommError::Facts facts_;
  int origin_ = kFoundByAll;

  struct Child {
    std::weak_ptr<Room> room;
    std::vector<int> members;  // ranks here, in their order there
  };
  struct Split {
    std::shared_ptr<Room> room;
    std::size_t to_fetch = 0;
  };
  void tell(const Child& child) const;  // an error here is one there
  std::map<std::pair<std::uint64_t, int>, Split> splitting_;
  std::vector<Child> children_;
};

}  // namespace zero
