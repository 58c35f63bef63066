#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "zero/error.h"
#include "zero/launch.h"

#include "comm/local_comm.h"

namespace zero {
namespace {

// Keeps the first exception that a rank threw of its own; failing that, the first of all.
class FirstError {
 public:
  void add(std::exception_ptr error) {
    bool secondhand = false;
    try {
      std::rethrow_exception(error);
    } catch (const SecondhandError&) {
      secondhand = true;
    } catch (...) {
      secondhand = false;
    }
    const std::lock_guard lock(mutex_);
    if (error_ == nullptr || (secondhand_ && !secondhand)) {
      error_ = std::move(error);
      secondhand_ = secondhand;
    }
  }
  void rethrow() const {
    if (error_ != nullptr) {
      std::rethrow_exception(error_);
    }
  }

 private:
  std::mutex mutex_;
  std::exception_ptr error_;
  bool secondhand_ = false;
};

}  // namespace

void run_ranks(int world, const std::function<void(Communicator&)>& body, LaunchOptions options) {
  require(world >= 1, "run_ranks: expected at least 1 rank, found " + std::to_string(world));
  const auto room = std::make_shared<Room>(world);
  FirstError first;
  const auto run = [&](int rank) {
    LocalCommunicator communicator(room, rank, options.deadline);
    try {
      body(communicator);
    } catch (const std::exception& e) {
      first.add(std::current_exception());  // before the others hear of it and throw theirs
      communicator.bootstrap().raise(e.what());
    } catch (...) {
      first.add(std::current_exception());
      communicator.bootstrap().raise("an exception that is no std::exception");
    }
  };
  std::vector<std::jthread> ranks;
  ranks.reserve(static_cast<std::size_t>(world));
  try {
    for (int rank = 0; rank < world; ++rank) {
      ranks.emplace_back(run, rank);
    }
  } catch (const std::exception& e) {  // no more threads: those that run must not wait for them
    room->fail(std::string("a rank could not be started: ") + e.what(), {}, Room::kFoundByAll);
    ranks.clear();
    throw;
  }
  ranks.clear();
  first.rethrow();
}

}  // namespace zero
