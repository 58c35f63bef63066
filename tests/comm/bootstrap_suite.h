// Conformance: the host-side channel, split's deadline, and communicator memory.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "zero/ledger.h"

#include "tests/comm/launcher.h"
#include "tests/comm/side.h"

namespace zero::testing {

class CommBootstrap : public LauncherTest {
 protected:
  static constexpr int kWorlds[] = {1, 2, 3, 4, 7, 8};

  static std::vector<std::byte> message(int rank, std::uint64_t round, std::size_t bytes) {
    std::vector<std::byte> out(bytes);
    for (std::size_t i = 0; i < bytes; ++i) {
      out[i] = static_cast<std::byte>(mixed(round * 16U + static_cast<std::uint64_t>(rank)) + i);
    }
    return out;
  }
  // Every rank gives `bytes(rank)` bytes; all must come back everywhere, in order of rank.
  template <class F>
  static void exchange(Communicator& communicator, std::uint64_t round, F bytes) {
    const int rank = communicator.rank();
    const auto all =
        communicator.bootstrap().all_gather(message(rank, round, bytes(rank)), long_deadline());
    ASSERT_EQ(all.size(), static_cast<std::size_t>(communicator.world()));
    for (int r = 0; r < communicator.world(); ++r) {
      ASSERT_EQ(all[static_cast<std::size_t>(r)], message(r, round, bytes(r)))
          << "from rank " << r << " in round " << round;
    }
  }
  static std::optional<CommError> error_of_check(Communicator& communicator) {
    return comm_error_of([&] { communicator.bootstrap().check(); });
  }
};

TEST_P(CommBootstrap, GathersBytesOfAnyLengthInOrderOfRank) {
  for (const int world : kWorlds) {
    run(world, [](Communicator& communicator, Backend&) {
      exchange(communicator, 0, [](int) { return std::size_t{0}; });
      exchange(communicator, 1, [](int) { return std::size_t{1}; });
      exchange(communicator, 2, [](int r) { return static_cast<std::size_t>(r) * 1009; });
      exchange(communicator, 3, [](int r) { return static_cast<std::size_t>(r % 2) * 65537; });
      exchange(communicator, 4, [](int) { return std::size_t{1} << 20U; });
    });
  }
}

TEST_P(CommBootstrap, RoundsAreNotMixedUp) {
  run(4, [](Communicator& communicator, Backend&) {
    for (std::uint64_t round = 0; round < 300; ++round) {
      exchange(communicator, round, [=](int r) {
        return static_cast<std::size_t>(mixed(round) >> 59U) * std::size_t(r);
      });
    }
  });
}

TEST_P(CommBootstrap, NothingIsRaisedAtFirst) {
  run(2, [](Communicator& communicator, Backend&) {
    EXPECT_NO_THROW(communicator.bootstrap().check());
    host_meeting(communicator);
    EXPECT_NO_THROW(communicator.bootstrap().check());
  });
}

TEST_P(CommBootstrap, WhatOneRankRaisesEndsTheWaitsOfAll) {
  run(4, [](Communicator& communicator, Backend& backend) {
    const OwnStream stream(backend);
    const Side side({.verb = Verb::kAllGather, .pieces = {{8}}}, communicator, backend);
    if (communicator.rank() == 3) {
      std::this_thread::sleep_for(scaled(milliseconds(20)));
      communicator.bootstrap().raise("disk full");
    }
    const auto start = std::chrono::steady_clock::now();
    const auto waiting = comm_error_of([&] {
      if (communicator.rank() % 2 == 0) {
        host_meeting(communicator);
      } else {
        backend.host_wait(side.start(communicator, {backend, stream, {}, "u", long_deadline()}));
      }
    });
    const auto checked = error_of_check(communicator);
    const auto later = comm_error_of([&] { (void)communicator.split(0, 0); });
    EXPECT_LT(std::chrono::steady_clock::now() - start, long_deadline() / 2);
    for (const auto& error : {waiting, checked, later}) {
      ASSERT_TRUE(error.has_value());
      EXPECT_THAT(error->what(), ::testing::AllOf(::testing::HasSubstr("disk full"),
                                                  ::testing::HasSubstr("rank 3")));
      EXPECT_EQ(error->facts().peer, 3);
      EXPECT_EQ(error->facts().rank, communicator.rank());
    }
  });
}

TEST_P(CommBootstrap, TheFirstErrorRaisedStays) {
  run(2, [](Communicator& communicator, Backend&) {
    if (communicator.rank() == 0) {
      communicator.bootstrap().raise("first");
      communicator.bootstrap().raise("second");
    }
    const auto waiting = comm_error_of([&] { host_meeting(communicator); });
    communicator.bootstrap().raise("third");
    const auto checked = error_of_check(communicator);
    ASSERT_TRUE(waiting && checked);
    EXPECT_THAT(waiting->what(), ::testing::HasSubstr("first"));
    EXPECT_STREQ(waiting->what(), checked->what());
  });
}

TEST_P(CommBootstrap, WhatIsRaisedReachesThePartsOfASplit) {
  run(4, [](Communicator& communicator, Backend& backend) {
    const auto part = communicator.split(communicator.rank() % 2, 0);
    if (communicator.rank() == 3) {
      communicator.bootstrap().raise("no more");
    }
    const Side side({.verb = Verb::kAllGather, .pieces = {{8}}}, *part, backend);
    // Rank 2's part {0, 2} is complete, but it may meet only until the news comes.
    const auto error = comm_error_of([&] {
      for (;;) {
        backend.host_wait(side.start(*part, {backend, kHost, {}, "u", long_deadline()}));
      }
    });
    ASSERT_TRUE(error.has_value());
    EXPECT_THAT(error->what(), ::testing::HasSubstr("no more"));
  });
}

TEST_P(CommBootstrap, ARankThatDoesNotComeIsNamedWithinTheDeadline) {
  run(3, [](Communicator& communicator, Backend&) {
    const auto start = std::chrono::steady_clock::now();
    std::optional<CommError> error;
    if (communicator.rank() == 0) {
      while (!error && std::chrono::steady_clock::now() - start < long_deadline()) {
        std::this_thread::sleep_for(milliseconds(1));
        try {
          communicator.bootstrap().check();
        } catch (const CommError& e) {
          error = e;
        }
      }
    } else {
      error =
          comm_error_of([&] { (void)communicator.bootstrap().all_gather({}, short_deadline()); });
    }
    EXPECT_LT(std::chrono::steady_clock::now() - start, long_deadline() / 2);
    ASSERT_TRUE(error.has_value());
    EXPECT_THAT(error->what(), ::testing::HasSubstr("rank 0"));
    EXPECT_EQ(error->facts().peer, 0);
    EXPECT_EQ(error->facts().rank, communicator.rank());
  });
}

TEST_P(CommBootstrap, ARankThatHasLeftIsNamed) {
  run(3, [](Communicator& communicator, Backend&) {
    if (communicator.rank() == 1) {
      return;
    }
    const auto error = comm_error_of([&] { host_meeting(communicator); });
    ASSERT_TRUE(error.has_value());
    EXPECT_THAT(error->what(), ::testing::HasSubstr("rank 1 has left"));
    EXPECT_EQ(error->facts().peer, 1);
  });
}

TEST_P(CommBootstrap, ASplitThatARankMissesEndsWithinTheLaunchersDeadline) {
  run(3,
      [](Communicator& communicator, Backend&) {
        host_meeting(communicator);  // threads may start far apart
        const auto start = std::chrono::steady_clock::now();
        if (communicator.rank() == 2) {
          std::this_thread::sleep_for(2 * short_deadline());
        }
        const auto error = comm_error_of([&] { (void)communicator.split(0, 0); });
        EXPECT_LT(std::chrono::steady_clock::now() - start, long_deadline() / 2);
        ASSERT_TRUE(error.has_value());
        EXPECT_THAT(error->what(), ::testing::HasSubstr("rank 2"));
      },
      {.deadline = short_deadline()});
}

TEST_P(CommBootstrap, MemoryOfTheTransportIsCountedByTheBackend) {
  for (const int world : {1, 3}) {
    run(world, [](Communicator& communicator, Backend& backend) {
      auto* ledger = dynamic_cast<Ledger*>(&backend);
      ASSERT_NE(ledger, nullptr);
      const auto before = ledger->usage().current_bytes;
      {
        const Buffer memory = communicator.allocate(
            backend, {.bytes = 4096, .category = Category::kGradients, .padding = 96});
        EXPECT_EQ(memory.bytes(), 4096U);
        EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory.data()) % 256, 0U);
        EXPECT_EQ(ledger->usage().of(Category::kGradients), 4000U);
        EXPECT_EQ(ledger->usage().of(Category::kPadding), 96U);
        const Transfer t{memory.data(), memory.data(), 16, DType::kInt64};
        backend.fill(memory.data(), 0, memory.bytes(), kHost);
        backend.host_wait(communicator.all_reduce({&t, 1}, {backend, kHost}));
      }
      EXPECT_EQ(ledger->usage().current_bytes, before);
      EXPECT_EQ(communicator.allocate(backend, {}).bytes(), 0U);
    });
  }
}

}  // namespace zero::testing
