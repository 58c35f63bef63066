// How the conformance suites start ranks: every transport is a Launcher, the suites know no other.
#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <tuple>

#include <gtest/gtest.h>

#include "zero/communicator.h"
#include "zero/cpu.h"
#include "zero/error.h"
#include "zero/launch.h"

#include "tests/support/time_scale.h"
#include "tests/support/watchdog.h"

namespace zero::testing {

using std::chrono::milliseconds;

// Body of one rank, with a device of its own. Ranks may be processes: a body shares nothing with
// other ranks but the communicator, and it checks its own rank's results.
using RankBody = std::function<void(Communicator&, Backend&)>;

struct Launcher {
  std::string name;
  std::function<void(int world, const RankBody&, LaunchOptions)> start;

  void run(int world, const RankBody& body,
           LaunchOptions options = {.deadline = scaled(std::chrono::seconds(10))}) const {
    start(world, body, options);
  }
};

inline std::ostream& operator<<(std::ostream& out, const Launcher& launcher) {
  return out << launcher.name;
}

// Ranks are threads; each has a CPU backend, so also a ledger.
inline Launcher local_launcher(int compute_threads = 1) {
  return {"Local" + std::to_string(compute_threads) + "Thread",
          [compute_threads](int world, const RankBody& body, LaunchOptions options) {
            run_ranks(
                world,
                [&](Communicator& communicator) {
                  const auto backend = make_cpu_backend(kUnlimited, compute_threads);
                  body(communicator, *backend);
                },
                options);
          }};
}

// A suite that runs at one world size per instance.
class WorldTest : public ::testing::TestWithParam<std::tuple<Launcher, int>> {
 protected:
  static int world() { return std::get<int>(GetParam()); }
  static void run(const RankBody& body) { std::get<Launcher>(GetParam()).run(world(), body); }
  // `milliseconds{}`: the launcher's own deadline.
  static void run(int ranks, const RankBody& body) {
    std::get<Launcher>(GetParam()).run(ranks, body);
  }

 private:
  Watchdog watchdog_{std::chrono::seconds(60)};
};

inline std::string name_of_instance(
    const ::testing::TestParamInfo<std::tuple<Launcher, int>>& info) {
  return std::get<Launcher>(info.param).name + "World" + std::to_string(std::get<int>(info.param));
}

// A suite whose tests choose their own world.
class LauncherTest : public ::testing::TestWithParam<Launcher> {
 protected:
  static void run(int ranks, const RankBody& body) { GetParam().run(ranks, body); }
  static void run(int ranks, const RankBody& body, LaunchOptions options) {
    GetParam().run(ranks, body, options);
  }

 private:
  Watchdog watchdog_;
};

inline std::string name_of_launcher(const ::testing::TestParamInfo<Launcher>& info) {
  return info.param.name;
}

// A stream that ends with its scope.
class OwnStream {
 public:
  explicit OwnStream(Backend& backend) : backend_(backend), stream_(backend.make_stream()) {}
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  ~OwnStream() { backend_.release_stream(stream_); }
  operator StreamRef() const { return stream_; }  // NOLINT: it stands for the stream

 private:
  Backend& backend_;
  StreamRef stream_;
};

// A deadline that a test expects to pass, and one that it does not.
inline milliseconds short_deadline() {
  return scaled(milliseconds(150));
}
inline milliseconds long_deadline() {
  return scaled(milliseconds(10'000));
}

inline void host_meeting(Communicator& communicator) {
  (void)communicator.bootstrap().all_gather({}, long_deadline());
}

// Runs `action` (which waits) and returns the CommError that it must end with.
template <class F>
std::optional<CommError> comm_error_of(F action) {
  try {
    action();
  } catch (const CommError& error) {
    return error;
  } catch (const std::exception& error) {
    ADD_FAILURE() << "expected a CommError, found: " << error.what();
    return std::nullopt;
  }
  ADD_FAILURE() << "expected a CommError, found no error";
  return std::nullopt;
}

}  // namespace zero::testing
