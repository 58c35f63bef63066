#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "zero/cpu.h"
#include "zero/launch.h"

#include "tests/comm/launcher.h"
#include "tests/comm/side.h"

namespace zero::testing {
namespace {

using ::testing::HasSubstr;

class RunRanks : public ::testing::Test {
 private:
  Watchdog watchdog_;
};

// Waits for the other ranks on the host; returns: what ended the wait, empty if they came
std::string wait_on_host(Communicator& communicator) {
  try {
    host_meeting(communicator);
  } catch (const CommError& error) {
    return error.what();
  }
  return "";
}

TEST_F(RunRanks, TakesADeadlineThatNoClockCanCount) {
  run_ranks(2,
            [](Communicator& communicator) {
              std::this_thread::sleep_for(std::chrono::milliseconds(20 * communicator.rank()));
              const auto all =
                  communicator.bootstrap().all_gather({}, std::chrono::milliseconds::max());
              EXPECT_EQ(all.size(), 2U);
              EXPECT_NE(communicator.split(0, 0), nullptr);
            },
            {.deadline = std::chrono::milliseconds::max()});
}

TEST_F(RunRanks, StartsEachRankOnce) {
  for (const int world : {1, 2, 3, 8, 33}) {
    std::vector<std::atomic<int>> started(static_cast<std::size_t>(world));
    run_ranks(world, [&](Communicator& communicator) {
      EXPECT_EQ(communicator.world(), world);
      EXPECT_EQ(communicator.transport(), Transport::kLocal);
      ++started[static_cast<std::size_t>(communicator.rank())];
    });
    for (const auto& times : started) {
      EXPECT_EQ(times, 1);
    }
  }
}

TEST_F(RunRanks, RefusesAWorldBelowOne) {
  for (const int world : {0, -1}) {
    bool called = false;
    try {
      run_ranks(world, [&](Communicator&) { called = true; });
      ADD_FAILURE() << "expected a UsageError for " << world << " ranks";
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), HasSubstr(std::to_string(world)));
    }
    EXPECT_FALSE(called);
  }
}

TEST_F(RunRanks, RethrowsWhatOneRankThrewAndTheOthersHearOfIt) {
  for (const int world : {1, 2, 4}) {
    for (int culprit = 0; culprit < world; ++culprit) {
      std::vector<std::string> heard(static_cast<std::size_t>(world));
      try {
        run_ranks(world, [&](Communicator& communicator) {
          if (communicator.rank() == culprit) {
            throw std::domain_error("batch 17 is empty");
          }
          heard[static_cast<std::size_t>(communicator.rank())] = wait_on_host(communicator);
          host_meeting(communicator);  // throws: the news of an error is an exception here too
        });
        ADD_FAILURE() << "expected the exception of rank " << culprit;
      } catch (const std::domain_error& error) {
        EXPECT_STREQ(error.what(), "batch 17 is empty");
      }
      for (int r = 0; r < world; ++r) {
        if (r != culprit) {
          EXPECT_THAT(heard[static_cast<std::size_t>(r)], HasSubstr("batch 17 is empty"));
          EXPECT_THAT(heard[static_cast<std::size_t>(r)],
                      HasSubstr("rank " + std::to_string(culprit)));
        }
      }
    }
  }
}

TEST_F(RunRanks, AnExceptionEndsCollectivesThatWaitOnStreams) {
  const auto start = [] {
    run_ranks(3, [](Communicator& communicator) {
      const auto backend = make_cpu_backend();
      const Side side({.verb = Verb::kAllReduce, .pieces = {{8}}}, communicator, *backend);
      const OwnStream stream(*backend);
      if (communicator.rank() == 1) {
        throw std::out_of_range("rank 1 is done for");
      }
      backend->host_wait(side.start(communicator, {*backend, stream}));
    });
  };
  EXPECT_THROW(start(), std::out_of_range);
}

TEST_F(RunRanks, AnExceptionEndsWaitsInASplitWithoutItsRank) {
  const auto start = [] {
    run_ranks(3, [](Communicator& communicator) {
      const auto part = communicator.split(communicator.rank() == 2 ? 1 : 0, 0);
      if (communicator.rank() == 2) {
        throw std::out_of_range("rank 2 is done for");
      }
      // Rank 1 waits for rank 2, and rank 0 waits for rank 1.
      host_meeting(communicator.rank() == 1 ? communicator : *part);
    });
  };
  EXPECT_THROW(start(), std::out_of_range);
}

TEST_F(RunRanks, KeepsTheFirstWhenTheNewsOfItCausesOthers) {
  const auto start = [] {
    run_ranks(4, [](Communicator& communicator) {
      if (communicator.rank() == 3) {
        throw std::domain_error("the cause");
      }
      const std::string news = wait_on_host(communicator);
      throw std::runtime_error("came of it: " + news);
    });
  };
  try {
    start();
    ADD_FAILURE() << "expected an exception";
  } catch (const std::domain_error& error) {
    EXPECT_STREQ(error.what(), "the cause");
  }
}

TEST_F(RunRanks, RethrowsWhatIsNoStdException) {
  EXPECT_THROW(run_ranks(2,
                         [](Communicator& communicator) {
                           if (communicator.rank() == 0) {
                             throw 42;
                           }
                           host_meeting(communicator);
                         }),
               int);
}

TEST_F(RunRanks, ThrowsWhatTheRanksFoundTogether) {
  const auto start = [] {
    run_ranks(3, [](Communicator& communicator) {
      if (communicator.rank() != 0) {
        (void)communicator.bootstrap().all_gather({}, short_deadline());
      } else {
        std::this_thread::sleep_for(3 * short_deadline());
      }
    });
  };
  EXPECT_THROW(start(), CommError);
}

TEST_F(RunRanks, ReturnsWhenEveryRankHandledTheError) {
  run_ranks(2, [](Communicator& communicator) {
    if (communicator.rank() == 0) {
      communicator.abort("enough");
    }
    EXPECT_THAT(wait_on_host(communicator), HasSubstr("enough"));
  });
}

TEST_F(RunRanks, MayRunInsideARankAndBesideAnother) {
  std::atomic<int> ended = 0;
  const auto outer = [&] {
    run_ranks(2, [&](Communicator& communicator) {
      run_ranks(3, [&](Communicator& inner) {
        host_meeting(inner);
        ++ended;
      });
      host_meeting(communicator);
    });
  };
  std::thread other(outer);
  outer();
  other.join();
  EXPECT_EQ(ended, 12);
}

}  // namespace
}  // namespace zero::testing
