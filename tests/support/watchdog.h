// Turns a hang of a multi-rank test into a failure that names the test.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <thread>

#include <gtest/gtest.h>

#include "tests/support/time_scale.h"

namespace zero::testing {

// Ends the process when its scope lasts longer than `limit` (scaled). A hanging thread cannot be
// stopped in any other way, and joining it would hang the whole run.
class Watchdog {
 public:
  explicit Watchdog(std::chrono::milliseconds limit = std::chrono::seconds(20))
      : limit_(scaled(limit)), name_(test_name()), thread_([this] { watch(); }) {}
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;
  ~Watchdog() {
    {
      const std::lock_guard lock(mutex_);
      over_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

 private:
  static std::string test_name() {
    const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
    return info == nullptr ? std::string("(outside a test)")
                           : std::string(info->test_suite_name()) + "." + info->name();
  }

  void watch() {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, limit_, [this] { return over_; })) {
      std::fprintf(stderr, "watchdog: %s hangs: not over after %lld ms\n", name_.c_str(),
                   static_cast<long long>(limit_.count()));
      std::fflush(nullptr);
      std::abort();
    }
  }

  std::chrono::milliseconds limit_;
  std::string name_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool over_ = false;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace zero::testing
