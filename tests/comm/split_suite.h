// Conformance: communicators made of some of the ranks of another.
#pragma once

#include <cstring>
#include <memory>
#include <vector>

#include <gtest/gtest.h>

#include "tests/comm/launcher.h"
#include "tests/comm/side.h"

namespace zero::testing {

class CommSplit : public WorldTest {
 protected:
  // The numbers that the ranks of `communicator` give, in its order.
  static std::vector<int> gathered(Communicator& communicator, int mine) {
    std::vector<int> all;
    for (const auto& bytes :
         communicator.bootstrap().all_gather(std::as_bytes(std::span(&mine, 1)), long_deadline())) {
      EXPECT_EQ(bytes.size(), sizeof(int));
      all.emplace_back();
      std::memcpy(&all.back(), bytes.data(), sizeof(int));
    }
    return all;
  }
  static void expect_works(Communicator& communicator, Backend& backend, std::uint64_t seed) {
    const OwnStream stream(backend);
    for (int i = 0; i < 4; ++i) {
      const Side side({.verb = static_cast<Verb>(i), .pieces = {{257}}, .seed = seed}, communicator,
                      backend);
      backend.host_wait(side.start(communicator, {backend, stream, {}, "split"}));
      side.check();
    }
  }
};

TEST_P(CommSplit, RanksOfOneColorAreOrderedByKey) {
  run([](Communicator& communicator, Backend& backend) {
    const int rank = communicator.rank();
    const auto half = communicator.split(rank % 2, -rank);
    std::vector<int> expected;
    for (int r = communicator.world() - 1; r >= 0; --r) {
      if (r % 2 == rank % 2) {
        expected.push_back(r);
      }
    }
    EXPECT_EQ(half->world(), static_cast<int>(expected.size()));
    EXPECT_EQ(gathered(*half, rank), expected);
    EXPECT_EQ(expected[static_cast<std::size_t>(half->rank())], rank);
    EXPECT_EQ(half->transport(), communicator.transport());
    expect_works(*half, backend, 1);
  });
}

TEST_P(CommSplit, EqualKeysKeepTheOrderOfRanks) {
  run([](Communicator& communicator, Backend& backend) {
    const auto same = communicator.split(7, 0);
    EXPECT_EQ(same->world(), communicator.world());
    EXPECT_EQ(same->rank(), communicator.rank());
    expect_works(*same, backend, 2);
  });
}

TEST_P(CommSplit, EqualKeysAreOrderedByRankWithinTheKey) {
  run([](Communicator& communicator, Backend&) {
    const int rank = communicator.rank();
    // keys 1 0 1 0 ...: the odd ranks first, then the even ones, each in order
    const auto mixed_keys = communicator.split(0, 1 - rank % 2);
    std::vector<int> expected;
    for (const int parity : {1, 0}) {
      for (int r = parity; r < communicator.world(); r += 2) {
        expected.push_back(r);
      }
    }
    EXPECT_EQ(gathered(*mixed_keys, rank), expected);
  });
}

TEST_P(CommSplit, AColorMayHaveOneRank) {
  run([](Communicator& communicator, Backend& backend) {
    const auto alone = communicator.split(communicator.rank(), 3);
    EXPECT_EQ(alone->world(), 1);
    EXPECT_EQ(alone->rank(), 0);
    expect_works(*alone, backend, 3);
    expect_works(communicator, backend, 4);
  });
}

TEST_P(CommSplit, ASplitMayBeSplit) {
  run([](Communicator& communicator, Backend& backend) {
    const int rank = communicator.rank();
    const auto half = communicator.split(rank / ((communicator.world() + 1) / 2), rank);
    const auto quarter = half->split(half->rank() % 2, half->rank());
    std::vector<int> expected;
    const std::vector<int> of_half = gathered(*half, rank);
    for (std::size_t r = static_cast<std::size_t>(half->rank() % 2); r < of_half.size(); r += 2) {
      expected.push_back(of_half[r]);
    }
    EXPECT_EQ(gathered(*quarter, rank), expected);
    expect_works(*quarter, backend, 5);
    expect_works(*half, backend, 6);
    expect_works(communicator, backend, 7);
  });
}

TEST_P(CommSplit, ParentAndPartsCarryIndependentTraffic) {
  run([](Communicator& communicator, Backend& backend) {
    const auto part = communicator.split(communicator.rank() % 2, communicator.rank());
    std::vector<std::unique_ptr<Side>> sides;
    const OwnStream a(backend);
    const OwnStream b(backend);
    for (int i = 0; i < 24; ++i) {
      // Parts differ in how much they do; the parent's numbers must not notice.
      const int mine = communicator.rank() % 2 == 0 ? 1 : 3;
      for (int k = 0; k < mine; ++k) {
        sides.push_back(std::make_unique<Side>(
            Exchange{.verb = Verb::kReduceScatter, .pieces = {{65}}, .seed = 1}, *part, backend));
        (void)sides.back()->start(*part, {backend, a});
      }
      sides.push_back(std::make_unique<Side>(
          Exchange{.verb = Verb::kAllGather, .pieces = {{65}}, .seed = 2}, communicator, backend));
      (void)sides.back()->start(communicator, {backend, b});
    }
    backend.host_wait(backend.record(a));
    backend.host_wait(backend.record(b));
    for (const auto& side : sides) {
      side->check();
    }
  });
}

TEST_P(CommSplit, SplitsAfterSplitsAreNotMixedUp) {
  run([](Communicator& communicator, Backend&) {
    const int rank = communicator.rank();
    for (int i = 0; i < 20; ++i) {
      const auto same = communicator.split(i, communicator.world() - rank);
      EXPECT_EQ(same->rank(), communicator.world() - 1 - rank);
      EXPECT_EQ(gathered(*same, i), std::vector<int>(static_cast<std::size_t>(same->world()), i));
    }
  });
}

TEST_P(CommSplit, APartWorksOnWhenOtherRanksHaveLeft) {
  run([](Communicator& communicator, Backend& backend) {
    const int last = communicator.world() - 1;
    const auto part = communicator.split(communicator.rank() == last ? 1 : 0, 0);
    if (communicator.rank() == last) {
      return;
    }
    std::this_thread::sleep_for(scaled(milliseconds(20)));
    expect_works(*part, backend, 8);
    EXPECT_EQ(gathered(*part, 1).size(), static_cast<std::size_t>(last));
  });
}

}  // namespace zero::testing
