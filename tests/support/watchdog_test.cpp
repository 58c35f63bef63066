#include "tests/support/watchdog.h"

#include <gtest/gtest.h>

namespace zero::testing {
namespace {

using std::chrono::milliseconds;

TEST(TimeScale, MultipliesByTheEnvironment) {
  EXPECT_EQ(scaled(milliseconds(100)).count(), static_cast<std::int64_t>(100.0 * time_scale()));
  EXPECT_GT(time_scale(), 0.0);
}

TEST(Watchdog, LetsAQuickScopePass) {
  const Watchdog watchdog;
}

TEST(WatchdogDeathTest, EndsAHangingScopeAndNamesTheTest) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        const Watchdog watchdog(milliseconds(50));
        std::this_thread::sleep_for(scaled(std::chrono::seconds(60)));
      },
      "WatchdogDeathTest.EndsAHangingScopeAndNamesTheTest hangs");
}

}  // namespace
}  // namespace zero::testing
