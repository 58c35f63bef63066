// Conformance: differences between ranks, ranks that do not come, abort, and misuse. Each is a
// typed error on every rank, in bounded time.
#pragma once

#include <chrono>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/comm/launcher.h"
#include "tests/comm/side.h"

namespace zero::testing {

using ::testing::AllOf;
using ::testing::HasSubstr;

// What one rank calls; nothing more is needed to see how it differs from another's.
struct Call {
  Verb verb = Verb::kAllReduce;
  std::vector<Piece> pieces = {{8}};
  std::string label = "unit h.0";
  SumOrder order = SumOrder::kTree;
};

class CommErrors : public LauncherTest {
 protected:
  // Starts `call` behind what is enqueued already and waits for it.
  static void make(const Call& call, Communicator& communicator, Backend& backend, StreamRef stream,
                   milliseconds deadline = long_deadline()) {
    const Side side({.verb = call.verb, .pieces = call.pieces, .order = call.order}, communicator,
                    backend);
    backend.host_wait(side.start(communicator, {backend, stream, {}, call.label, deadline}));
  }

  // Two good collectives, then the last rank calls `odd` where the others call `common`.
  static void expect_mismatch(const Call& common, const Call& odd,
                              const std::vector<std::string>& words) {
    for (const int world : {2, 3}) {
      run(world, [&](Communicator& communicator, Backend& backend) {
        const int last = communicator.world() - 1;
        const OwnStream stream(backend);
        make({}, communicator, backend, stream);
        make({}, communicator, backend, stream);
        const auto error = comm_error_of([&] {
          make(communicator.rank() == last ? odd : common, communicator, backend, stream);
        });
        ASSERT_TRUE(error.has_value());
        for (const std::string& word : words) {
          EXPECT_THAT(error->what(), HasSubstr(word));
        }
        EXPECT_THAT(error->what(), HasSubstr("rank " + std::to_string(last)));
        EXPECT_EQ(error->facts().sequence, 2U);
        EXPECT_EQ(error->facts().rank, communicator.rank());
        EXPECT_GE(error->facts().peer, 0);
        EXPECT_LT(error->facts().peer, communicator.world());
        EXPECT_THAT(error->facts().operation,
                    ::testing::AnyOf(name_of(common.verb), name_of(odd.verb)));
      });
    }
  }

  static void expect_usable(Communicator& communicator, Backend& backend) {
    const Side side({.verb = Verb::kReduceScatter, .pieces = {{64}}, .seed = 9}, communicator,
                    backend);
    backend.host_wait(side.start(communicator, {backend, kHost, {}, "after misuse"}));
    side.check();
  }
};

TEST_P(CommErrors, AnotherOperationIsNamedOnBothSides) {
  expect_mismatch({.verb = Verb::kReduceScatter}, {.verb = Verb::kAllGather},
                  {"reduce_scatter", "all_gather", "unit h.0"});
  expect_mismatch({.verb = Verb::kAllReduce}, {.verb = Verb::kAllToAll},
                  {"all_reduce", "all_to_all"});
}

TEST_P(CommErrors, AnotherCountIsNamedOnBothSides) {
  expect_mismatch({.pieces = {{4}, {1234}}}, {.pieces = {{4}, {1235}}}, {"1234", "1235"});
}

TEST_P(CommErrors, AnotherCountLateInAGroupIsNamedOnBothSides) {
  std::vector<Piece> pieces(40, {2});
  auto other = pieces;
  other[33].count = 777;
  expect_mismatch({.pieces = pieces}, {.pieces = other}, {"777", "33"});
}

TEST_P(CommErrors, AnotherDtypeIsNamedOnBothSides) {
  expect_mismatch(
      {.verb = Verb::kAllGather, .pieces = {{8, DType::kFloat32}}},
      {.verb = Verb::kAllGather, .pieces = {{8, DType::kBfloat16}}},
      {std::string(zero::name_of(DType::kFloat32)), std::string(zero::name_of(DType::kBfloat16))});
}

TEST_P(CommErrors, AnotherLabelIsNamedOnBothSides) {
  expect_mismatch({.label = "unit h.7"}, {.label = "unit h.8"}, {"unit h.7", "unit h.8"});
}

TEST_P(CommErrors, AnotherNumberOfArraysIsNamedOnBothSides) {
  expect_mismatch({.pieces = {{8}, {8}}}, {.pieces = {{8}, {8}, {31}}}, {"31"});
  expect_mismatch({.pieces = {}}, {.pieces = {{31}}}, {"31"});
}

TEST_P(CommErrors, AnotherOrderOfSummationIsAnError) {
  expect_mismatch({.verb = Verb::kReduceScatter, .order = SumOrder::kTree},
                  {.verb = Verb::kReduceScatter, .order = SumOrder::kTransport},
                  {"reduce_scatter"});
}

TEST_P(CommErrors, TheSameCallsInAnotherOrderAreAnError) {
  run(2, [](Communicator& communicator, Backend& backend) {
    const OwnStream stream(backend);
    const Side a({.verb = Verb::kAllReduce, .pieces = {{8}}}, communicator, backend);
    const Side b({.verb = Verb::kAllReduce, .pieces = {{8}}}, communicator, backend);
    const bool swap = communicator.rank() == 1;
    const auto start = [&](bool first) {
      return (first ? a : b)
          .start(communicator,
                 {backend, stream, {}, first ? "unit first" : "unit second", long_deadline()});
    };
    (void)start(!swap);
    const Event done = start(swap);
    const auto error = comm_error_of([&] { backend.host_wait(done); });
    ASSERT_TRUE(error.has_value());
    EXPECT_THAT(error->what(), AllOf(HasSubstr("unit first"), HasSubstr("unit second")));
    EXPECT_EQ(error->facts().sequence, 0U);
  });
}

TEST_P(CommErrors, TheFirstErrorStays) {
  run(3, [](Communicator& communicator, Backend& backend) {
    const OwnStream stream(backend);
    const std::string label = communicator.rank() == 1 ? "odd" : "common";
    const auto first =
        comm_error_of([&] { make({.label = label}, communicator, backend, stream); });
    communicator.abort("too late");
    communicator.bootstrap().raise("later still");
    const OwnStream fresh(backend);  // a stream that nothing has poisoned
    const auto second = comm_error_of([&] { make({}, communicator, backend, fresh); });
    const auto third = comm_error_of([&] { communicator.bootstrap().check(); });
    const auto fourth = comm_error_of([&] { host_meeting(communicator); });
    ASSERT_TRUE(first && second && third && fourth);
    EXPECT_STREQ(first->what(), second->what());
    EXPECT_STREQ(first->what(), third->what());
    EXPECT_STREQ(first->what(), fourth->what());
    EXPECT_THAT(first->what(), AllOf(HasSubstr("odd"), HasSubstr("common")));
  });
}

TEST_P(CommErrors, ARankThatNeverComesIsNamedOnAllRanksWithinTheDeadline) {
  run(3, [](Communicator& communicator, Backend& backend) {
    const OwnStream stream(backend);
    make({}, communicator, backend, stream);
    const auto start = std::chrono::steady_clock::now();
    if (communicator.rank() == 1) {  // lives, but elsewhere, until it hears of the error
      while (std::chrono::steady_clock::now() - start < long_deadline()) {
        try {
          communicator.bootstrap().check();
        } catch (const CommError&) {
          break;
        }
        std::this_thread::sleep_for(milliseconds(1));
      }
    }
    const auto error = comm_error_of(
        [&] { make({.label = "unit h.3"}, communicator, backend, stream, short_deadline()); });
    EXPECT_LT(std::chrono::steady_clock::now() - start, long_deadline() / 2);
    ASSERT_TRUE(error.has_value());
    EXPECT_THAT(error->what(),
                AllOf(HasSubstr("all_reduce"), HasSubstr("unit h.3"), HasSubstr("rank 1"),
                      HasSubstr(std::to_string(short_deadline().count()) + " ms")));
    EXPECT_EQ(error->facts().operation, "all_reduce");
    EXPECT_EQ(error->facts().sequence, 1U);
    EXPECT_EQ(error->facts().rank, communicator.rank());
    EXPECT_EQ(error->facts().peer, 1);
  });
}

TEST_P(CommErrors, TheDeadlineDoesNotCountTheTimeBeforeARankComes) {
  run(2, [](Communicator& communicator, Backend& backend) {
    const OwnStream stream(backend);
    const milliseconds deadline = scaled(milliseconds(600));  // more than ranks are ever apart
    host_meeting(communicator);
    backend.call(stream, [=] { std::this_thread::sleep_for(deadline + deadline / 4); });
    make({}, communicator, backend, stream, deadline);
    expect_usable(communicator, backend);
  });
}

TEST_P(CommErrors, ARankThatLeavesIsNamed) {
  run(4, [](Communicator& communicator, Backend& backend) {
    const OwnStream stream(backend);
    make({}, communicator, backend, stream);
    if (communicator.rank() == 2) {
      return;
    }
    const auto start = std::chrono::steady_clock::now();
    const auto error = comm_error_of([&] {
      make({.verb = Verb::kAllGather, .label = "unit h.1"}, communicator, backend, stream);
    });
    EXPECT_LT(std::chrono::steady_clock::now() - start, long_deadline() / 2);
    ASSERT_TRUE(error.has_value());
    EXPECT_THAT(error->what(), AllOf(HasSubstr("rank 2 has left"), HasSubstr("all_gather"),
                                     HasSubstr("unit h.1")));
    EXPECT_EQ(error->facts().operation, "all_gather");
    EXPECT_EQ(error->facts().sequence, 1U);
    EXPECT_EQ(error->facts().rank, communicator.rank());
    EXPECT_EQ(error->facts().peer, 2);
  });
}

TEST_P(CommErrors, ARankThatHasEnqueuedItsPartMayLeave) {
  for (const int world : {2, 4}) {
    run(world, [](Communicator& communicator, Backend& backend) {
      const Side side({.verb = Verb::kAllGather, .pieces = {{1009}}}, communicator, backend);
      const OwnStream stream(backend);  // ends before the memory that its work uses
      if (communicator.rank() != 0) {
        std::this_thread::sleep_for(milliseconds(10));
      }
      const Event done = side.start(communicator, {backend, stream});
      if (communicator.rank() == 0) {
        return;  // the end of its stream finishes what is enqueued
      }
      backend.host_wait(done);
      side.check();
    });
  }
}

// B013: ranks make 5, 5 and 4 steps.
TEST_P(CommErrors, B013AnUnequalNumberOfCollectivesIsAnErrorThatNamesNumberAndRank) {
  run(3, [](Communicator& communicator, Backend& backend) {
    const OwnStream stream(backend);
    const Call gather{.verb = Verb::kAllGather, .label = "step"};
    for (int step = 0; step < 4; ++step) {
      make(gather, communicator, backend, stream);
    }
    if (communicator.rank() == 2) {
      return;
    }
    const auto error = comm_error_of([&] { make(gather, communicator, backend, stream); });
    ASSERT_TRUE(error.has_value());
    EXPECT_THAT(error->what(), AllOf(HasSubstr("collective 4"), HasSubstr("rank 2 has left")));
    EXPECT_EQ(error->facts().sequence, 4U);
    EXPECT_EQ(error->facts().peer, 2);
  });
}

// B013, the rank that has finished goes on to something else on the host.
TEST_P(CommErrors, B013ARankInAHostMeetingWhileOthersAreInACollectiveIsAnError) {
  run(3, [](Communicator& communicator, Backend& backend) {
    const OwnStream stream(backend);
    for (int step = 0; step < 4; ++step) {
      make({}, communicator, backend, stream);
    }
    const auto error = comm_error_of([&] {
      if (communicator.rank() == 2) {
        (void)communicator.bootstrap().all_gather({}, short_deadline());
      } else {
        make({.label = "fifth step"}, communicator, backend, stream, short_deadline());
      }
    });
    ASSERT_TRUE(error.has_value());
    EXPECT_THAT(error->what(), HasSubstr("rank"));
  });
}

TEST_P(CommErrors, AbortEndsAllWaits) {
  run(3, [](Communicator& communicator, Backend& backend) {
    const OwnStream stream(backend);
    make({}, communicator, backend, stream);
    if (communicator.rank() == 1) {
      std::this_thread::sleep_for(scaled(milliseconds(20)));
      communicator.abort("the user pressed a key");
    }
    const auto start = std::chrono::steady_clock::now();
    const auto error = comm_error_of([&] {
      if (communicator.rank() == 0) {
        host_meeting(communicator);
      } else {
        make({}, communicator, backend, stream);
      }
    });
    EXPECT_LT(std::chrono::steady_clock::now() - start, long_deadline() / 2);
    ASSERT_TRUE(error.has_value());
    EXPECT_THAT(error->what(), AllOf(HasSubstr("the user pressed a key"), HasSubstr("rank 1")));
  });
}

TEST_P(CommErrors, AnErrorOfOneRanksStreamReachesItsWaitsAndTheOthers) {
  EXPECT_THROW(
      run(3,
          [](Communicator& communicator, Backend& backend) {
            const OwnStream producer(backend);
            const OwnStream stream(backend);
            std::vector<Event> after;
            if (communicator.rank() == 1) {
              backend.call(producer, [] { throw std::domain_error("bad input"); });
              after.push_back(backend.record(producer));
            }
            const Side side({.verb = Verb::kAllReduce, .pieces = {{8}}}, communicator, backend);
            const On on{backend, stream, after, "poisoned", long_deadline()};
            if (communicator.rank() == 1) {
              const Event done = side.start(communicator, on);
              try {
                backend.host_wait(done);
              } catch (const std::exception& e) {
                communicator.bootstrap().raise(e.what());  // as the engine does
                throw;
              }
            } else {
              const auto error =
                  comm_error_of([&] { backend.host_wait(side.start(communicator, on)); });
              ASSERT_TRUE(error.has_value());
              EXPECT_THAT(error->what(), AllOf(HasSubstr("bad input"), HasSubstr("rank 1")));
            }
          }),
      std::domain_error);
}

// ---- misuse: refused before anything is enqueued, so one rank's mistake costs nothing

class CommMisuse : public CommErrors {
 protected:
  // `bad` is called on rank 0 only; then all ranks must be able to go on.
  static void expect_refused(const std::function<void(Communicator&, const On&, float*)>& bad,
                             const std::string& word) {
    run(2, [&](Communicator& communicator, Backend& backend) {
      const OwnStream stream(backend);
      if (communicator.rank() == 0) {
        const Buffer memory = backend.allocate({.bytes = 1024});
        const On on{backend, stream, {}, "unit h.9"};
        try {
          bad(communicator, on, memory.as<float>());
          ADD_FAILURE() << "expected a UsageError about " << word;
        } catch (const UsageError& error) {
          EXPECT_THAT(error.what(), AllOf(HasSubstr(word), HasSubstr("unit h.9")));
        }
      }
      expect_usable(communicator, backend);
    });
  }
};

TEST_P(CommMisuse, NullPointersWithACountAreRefused) {
  const std::vector<Verb> verbs = {Verb::kReduceScatter, Verb::kAllGather, Verb::kAllReduce,
                                   Verb::kAllToAll};
  for (const Verb verb : verbs) {
    for (const bool null_in : {true, false}) {
      expect_refused(
          [=](Communicator& communicator, const On& on, float* memory) {
            const Transfer good{memory, memory + 64, 4};
            const Transfer bad{null_in ? nullptr : memory, null_in ? memory : nullptr, 4};
            const std::vector<Transfer> group = {good, bad};
            switch (verb) {
              case Verb::kReduceScatter:
                (void)communicator.reduce_scatter(group, SumOrder::kTree, on);
                break;
              case Verb::kAllGather:
                (void)communicator.all_gather(group, on);
                break;
              case Verb::kAllReduce:
                (void)communicator.all_reduce(group, on);
                break;
              case Verb::kAllToAll:
                (void)communicator.all_to_all(group, on);
                break;
            }
          },
          std::string(name_of(verb)));
    }
  }
}

TEST_P(CommMisuse, SumsOfOtherDtypesAreRefused) {
  for (const DType dtype : {DType::kFloat16, DType::kUint16, DType::kUint8}) {
    expect_refused(
        [=](Communicator& communicator, const On& on, float* memory) {
          const Transfer t{memory, memory + 64, 4, dtype};
          (void)communicator.reduce_scatter({&t, 1}, SumOrder::kTree, on);
        },
        std::string(zero::name_of(dtype)));
  }
  for (const DType dtype : {DType::kBfloat16, DType::kFloat16, DType::kUint16, DType::kUint8}) {
    expect_refused(
        [=](Communicator& communicator, const On& on, float* memory) {
          const Transfer t{memory, memory + 64, 4, dtype};
          (void)communicator.all_reduce({&t, 1}, on);
        },
        std::string(zero::name_of(dtype)));
  }
}

TEST_P(CommMisuse, ReduceScatterIntoItsInputIsRefusedButForItsOwnFp32Block) {
  const auto refused = [](std::ptrdiff_t out, DType dtype) {
    expect_refused(
        [=](Communicator& communicator, const On& on, float* memory) {
          const Transfer t{memory, memory + out, 16, dtype};
          (void)communicator.reduce_scatter({&t, 1}, SumOrder::kTree, on);
        },
        "overlap");
  };
  refused(16, DType::kFloat32);  // rank 1's block, on rank 0
  refused(1, DType::kFloat32);
  refused(0, DType::kBfloat16);  // the sums are wider than what they replace
}

TEST_P(CommMisuse, AllGatherFromAnotherBlockIsRefused) {
  expect_refused(
      [](Communicator& communicator, const On& on, float* memory) {
        const Transfer t{memory + 16, memory, 16};
        (void)communicator.all_gather({&t, 1}, on);
      },
      "overlap");
}

TEST_P(CommMisuse, AllReduceWithAShiftIsRefused) {
  expect_refused(
      [](Communicator& communicator, const On& on, float* memory) {
        const Transfer t{memory, memory + 1, 16};
        (void)communicator.all_reduce({&t, 1}, on);
      },
      "overlap");
}

TEST_P(CommMisuse, AllToAllOverItselfIsRefused) {
  for (const int shift : {0, 1, 31}) {
    expect_refused(
        [=](Communicator& communicator, const On& on, float* memory) {
          const Transfer t{memory, memory + shift, 16};
          (void)communicator.all_to_all({&t, 1}, on);
        },
        "overlap");
  }
}

}  // namespace zero::testing
