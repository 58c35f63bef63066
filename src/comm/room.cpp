#include "comm/room.h"

#include <algorithm>
#include <chrono>
#include <exception>

#include "zero/dtype.h"

namespace zero {
namespace {

std::string name_of(Room::Channel channel) {
  return channel == Room::Channel::kData ? "collective " : "host meeting ";
}

std::string describe(const Arrival& v) {
  std::string text = v.operation;
  if (!v.label.empty()) {
    text += " of \"" + v.label + "\"";
  }
  if (v.transfers.empty()) {
    return text;
  }
  text += " [";
  constexpr std::size_t kShown = 4;
  for (std::size_t i = 0; i < std::min(v.transfers.size(), kShown); ++i) {
    const Transfer& t = v.transfers[i];
    text += (i == 0 ? "" : ", ") + std::to_string(t.count) + " x " + std::string(name_of(t.dtype));
  }
  if (v.transfers.size() > kShown) {
    text += ", ... " + std::to_string(v.transfers.size()) + " arrays";
  }
  return text + "]";
}

bool agree(const Arrival& a, const Arrival& b) {
  return a.operation == b.operation && a.label == b.label && a.order == b.order &&
         std::equal(a.transfers.begin(), a.transfers.end(), b.transfers.begin(), b.transfers.end(),
                    [](const Transfer& x, const Transfer& y) {
                      return x.count == y.count && x.dtype == y.dtype;
                    });
}

// Where two grouped calls look alike up to the arrays shown, says which array differs.
std::string first_difference(const Arrival& a, const Arrival& b) {
  const std::size_t both = std::min(a.transfers.size(), b.transfers.size());
  for (std::size_t i = 0; i < both; ++i) {
    const Transfer& x = a.transfers[i];
    const Transfer& y = b.transfers[i];
    if (x.count != y.count || x.dtype != y.dtype) {
      return " (array " + std::to_string(i) + ": " + std::to_string(x.count) + " x " +
             std::string(name_of(x.dtype)) + " and " + std::to_string(y.count) + " x " +
             std::string(name_of(y.dtype)) + ")";
    }
  }
  return "";
}

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "an exception that is no std::exception";
  }
}

}  // namespace

std::uint64_t Room::issue(int rank, Channel channel) {
  const Lock lock(mutex_);
  return issued_[static_cast<std::size_t>(channel)][static_cast<std::size_t>(rank)]++;
}

void Room::meet(const Caller& caller, Arrival arrival, std::span<const Round> rounds) {
  Lock lock(mutex_);
  if (failed_) {
    throw_failure(caller.rank);
  }
  Meeting& meeting = enter(lock, caller, std::move(arrival), rounds.size());
  await_others(lock, caller, meeting);
  work(lock, caller, meeting, rounds);
}

Room::Meeting& Room::enter(Lock& /*held*/, const Caller& caller, Arrival arrival,
                           std::size_t rounds) {
  Meeting& meeting = meetings_[{caller.channel, caller.sequence}];
  if (meeting.arrived == 0) {
    meeting.arrivals.resize(static_cast<std::size_t>(world_));
    meeting.present.resize(static_cast<std::size_t>(world_));
    meeting.rounds_finished.resize(rounds);
  }
  const auto me = static_cast<std::size_t>(caller.rank);
  meeting.arrivals[me] = std::move(arrival);
  const Arrival& mine = meeting.arrivals[me];
  for (std::size_t r = 0; r < meeting.present.size(); ++r) {
    if (meeting.present[r] != 0 && !agree(meeting.arrivals[r], mine)) {
      fail_locked(name_of(caller.channel) + std::to_string(caller.sequence) +
                      " differs between ranks: rank " + std::to_string(r) + " called " +
                      describe(meeting.arrivals[r]) + ", rank " + std::to_string(me) + " called " +
                      describe(mine) + first_difference(meeting.arrivals[r], mine) +
                      "; all ranks must make the same calls in the same order",
                  {mine.operation, caller.sequence, caller.rank, static_cast<int>(r)}, kFoundByAll);
      break;
    }
  }
  meeting.present[me] = 1;
  if (++meeting.arrived == world_ && !failed_) {
    meeting.open = true;
    changed_.notify_all();
  }
  return meeting;
}

void Room::await_others(Lock& lock, const Caller& caller, Meeting& meeting) {
  constexpr std::chrono::hours kForever{24 * 365 * 100};  // the clock cannot count much further
  const auto until = std::chrono::steady_clock::now() +
                     std::min<std::chrono::milliseconds>(caller.deadline, kForever);
  while (!meeting.open && !failed_) {
    if (const int gone = gone_for(caller, meeting); gone >= 0) {
      fail_absent(caller, meeting, gone,
                  "rank " + std::to_string(gone) + " has left after " +
                      std::to_string(issued_[static_cast<std::size_t>(caller.channel)]
                                            [static_cast<std::size_t>(gone)]) +
                      " of them");
    } else if (changed_.wait_until(lock, until) == std::cv_status::timeout && !meeting.open &&
               !failed_) {
      const int absent = first_absent(meeting);
      fail_absent(caller, meeting, absent,
                  "rank " + std::to_string(absent) + " did not come within " +
                      std::to_string(caller.deadline.count()) + " ms; it has asked for " +
                      std::to_string(issued_[static_cast<std::size_t>(caller.channel)]
                                            [static_cast<std::size_t>(absent)]) +
                      " of them so far");
    }
  }
  if (!meeting.open) {
    throw_failure(caller.rank);
  }
}

// Once a meeting is open every rank finishes every round: nobody may let go of memory that another
// rank still reads, so a failure only marks the result.
void Room::work(Lock& lock, const Caller& caller, Meeting& meeting, std::span<const Round> rounds) {
  std::exception_ptr mine;
  for (std::size_t i = 0; i < rounds.size(); ++i) {
    if (mine == nullptr) {
      lock.unlock();
      try {
        rounds[i](meeting.arrivals);
      } catch (...) {
        mine = std::current_exception();
      }
      lock.lock();
      if (mine != nullptr && meeting.broken_by < 0) {
        meeting.broken_by = caller.rank;
        meeting.broken = "rank " + std::to_string(caller.rank) + " failed in " +
                         describe(meeting.arrivals[static_cast<std::size_t>(caller.rank)]) + ": " +
                         text_of(mine);
      }
    }
    if (++meeting.rounds_finished[i] == world_) {
      changed_.notify_all();
    }
    changed_.wait(lock, [&] { return meeting.rounds_finished[i] == world_; });
  }
  const std::string broken = meeting.broken;
  const int broken_by = meeting.broken_by;
  const std::string operation = meeting.arrivals[static_cast<std::size_t>(caller.rank)].operation;
  if (++meeting.departed == world_) {
    meetings_.erase({caller.channel, caller.sequence});
  }
  if (broken_by >= 0) {
    fail_locked(broken, {operation, caller.sequence, broken_by, broken_by}, broken_by);
    if (mine != nullptr) {
      std::rethrow_exception(mine);
    }
    throw_failure(caller.rank);
  }
}

int Room::gone_for(const Caller& caller, const Meeting& meeting) const {
  const auto& issued = issued_[static_cast<std::size_t>(caller.channel)];
  for (std::size_t r = 0; r < left_.size(); ++r) {
    if (left_[r] != 0 && meeting.present[r] == 0 && issued[r] <= caller.sequence) {
      return static_cast<int>(r);
    }
  }
  return -1;
}

int Room::first_absent(const Meeting& meeting) const {
  const auto found = std::find(meeting.present.begin(), meeting.present.end(), 0);
  return static_cast<int>(found - meeting.present.begin());
}

void Room::fail_absent(const Caller& caller, const Meeting& meeting, int absent,
                       const std::string& why) {
  const Arrival& mine = meeting.arrivals[static_cast<std::size_t>(caller.rank)];
  fail_locked("rank " + std::to_string(caller.rank) + " waited in " + name_of(caller.channel) +
                  std::to_string(caller.sequence) + ", " + describe(mine) + ", but " + why,
              {mine.operation, caller.sequence, caller.rank, absent}, kFoundByAll);
}

void Room::fail(const std::string& error, CommError::Facts facts, int origin) noexcept {
  try {
    const Lock lock(mutex_);
    fail_locked(error, std::move(facts), origin);
  } catch (...) {  // no memory for the message: the flag is what ends the waits
    const Lock lock(mutex_);
    failed_ = true;
    changed_.notify_all();
  }
}

void Room::fail_locked(const std::string& error, CommError::Facts facts, int origin) {
  if (failed_) {
    return;
  }
  failed_ = true;
  changed_.notify_all();
  error_ = error;
  facts_ = std::move(facts);
  origin_ = origin;
  for (const Child& child : children_) {  // always parent before child: no cycle of locks
    tell(child);
  }
}

void Room::tell(const Child& child) const {
  int origin = origin_;
  if (origin != kFoundByAll) {
    const auto found = std::find(child.members.begin(), child.members.end(), origin);
    origin =
        found == child.members.end() ? kOutside : static_cast<int>(found - child.members.begin());
  }
  if (const auto room = child.room.lock()) {
    room->fail(error_, facts_, origin);
  }
}

void Room::check(int rank) {
  const Lock lock(mutex_);
  if (failed_) {
    throw_failure(rank);
  }
}

void Room::throw_failure(int rank) const {
  CommError::Facts facts = facts_;
  facts.rank = rank;
  if (origin_ != kFoundByAll && origin_ != rank) {
    throw SecondhandError(error_, std::move(facts));
  }
  throw CommError(error_, std::move(facts));
}

void Room::leave(int rank) noexcept {
  const Lock lock(mutex_);
  left_[static_cast<std::size_t>(rank)] = 1;
  changed_.notify_all();
}

std::shared_ptr<Room> Room::child(std::uint64_t ordinal, int color, std::span<const int> members) {
  const Lock lock(mutex_);
  Split& split = splitting_[{ordinal, color}];
  if (split.room == nullptr) {
    split = {std::make_shared<Room>(static_cast<int>(members.size())), members.size()};
    std::erase_if(children_, [](const Child& c) { return c.room.expired(); });
    children_.push_back({split.room, {members.begin(), members.end()}});
    if (failed_) {
      tell(children_.back());
    }
  }
  std::shared_ptr<Room> room = split.room;
  if (--split.to_fetch == 0) {
    splitting_.erase({ordinal, color});
  }
  return room;
}

}  // namespace zero
