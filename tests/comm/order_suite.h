// Conformance: what runs before what. Delays make a lost wait show itself as wrong bytes.
#pragma once

#include <memory>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "tests/comm/launcher.h"
#include "tests/comm/side.h"

namespace zero::testing {

class CommOrder : public WorldTest {
 protected:
  static void delay(Backend& backend, StreamRef stream, milliseconds time) {
    backend.call(stream, [time] { std::this_thread::sleep_for(time); });
  }
  static Exchange each_verb(int i, std::size_t count) {
    return {.verb = static_cast<Verb>(i % 4),
            .pieces = {{count, DType::kFloat32}},
            .seed = static_cast<std::uint64_t>(i)};
  }
};

TEST_P(CommOrder, InputsAreNotReadBeforeTheEventsGiven) {
  run([](Communicator& communicator, Backend& backend) {
    const OwnStream producer(backend);
    const OwnStream second(backend);
    const OwnStream stream(backend);
    for (int i = 0; i < 4; ++i) {
      Exchange x = each_verb(i, 257);
      x.pieces.push_back({31, DType::kFloat32});
      const Side side(x, communicator, backend);
      // The right inputs arrive late, on two streams, with wrong ones there before.
      std::vector<Event> after;
      for (const StreamRef late : {StreamRef(producer), StreamRef(second)}) {
        const std::size_t piece = after.size();
        backend.fill(side.in(piece), 0x11, side.input(piece).size(), kHost);
        delay(backend, late, milliseconds(communicator.rank() % 2 == 0 ? 20 : 5));
        backend.copy(side.in(piece), side.input(piece).data(), side.input(piece).size(), late);
        after.push_back(backend.record(late));
      }
      backend.host_wait(side.start(communicator, {backend, stream, after}));
      side.check();
    }
  });
}

TEST_P(CommOrder, OutputsAreNotWrittenBeforeTheEventsGiven) {
  run([](Communicator& communicator, Backend& backend) {
    const OwnStream reader(backend);
    const OwnStream stream(backend);
    for (int i = 0; i < 4; ++i) {
      const Side side(each_verb(i, 257), communicator, backend);
      const std::size_t bytes = side.output_bytes(0);
      backend.fill(side.out(0), 0x11, bytes, kHost);
      std::vector<std::byte> read(bytes);
      delay(backend, reader, milliseconds(20));
      backend.copy(read.data(), side.out(0), bytes, reader);
      const Event was_read = backend.record(reader);
      backend.host_wait(side.start(communicator, {backend, stream, {&was_read, 1}}));
      side.check();
      EXPECT_EQ(read, std::vector<std::byte>(bytes, std::byte{0x11}));
    }
  });
}

TEST_P(CommOrder, AVerbReturnsBeforeTheOthersHaveComeAndItsEventMarksTheEnd) {
  run([](Communicator& communicator, Backend& backend) {
    const bool last = communicator.rank() == communicator.world() - 1;
    const OwnStream stream(backend);
    const OwnStream consumer(backend);
    for (int i = 0; i < 4; ++i) {
      const Side side(each_verb(i, 1009), communicator, backend);
      if (last) {  // the others look at their events first
        host_meeting(communicator);
      }
      const Event done = side.start(communicator, {backend, stream});
      if (!last) {
        EXPECT_FALSE(backend.done(done));
        host_meeting(communicator);
      }
      std::vector<std::byte> seen(side.output_bytes(0));
      backend.wait(consumer, done);
      backend.copy(seen.data(), side.out(0), seen.size(), consumer);
      backend.host_wait(backend.record(consumer));
      EXPECT_TRUE(backend.done(done));
      side.check_output(0, seen);
    }
  });
}

TEST_P(CommOrder, InputsMayBeOverwrittenBehindTheEvent) {
  run([](Communicator& communicator, Backend& backend) {
    const OwnStream stream(backend);
    const OwnStream other(backend);
    for (int i = 0; i < 32; ++i) {
      const Side side(each_verb(i, 4099), communicator, backend);
      const Event done = side.start(communicator, {backend, stream});
      // Others may be behind: their reads of this rank's inputs must not see what comes next.
      backend.wait(other, done);
      backend.fill(side.in(0), 0x77, side.input(0).size(), other);
      backend.host_wait(backend.record(other));
      std::vector<std::byte> seen(side.output_bytes(0));
      backend.copy(seen.data(), side.out(0), seen.size(), kHost);
      side.check_output(0, seen);
    }
  });
}

TEST_P(CommOrder, ManyCollectivesAreInFlightWithoutAHostWait) {
  run([](Communicator& communicator, Backend& backend) {
    std::vector<std::unique_ptr<Side>> sides;
    const OwnStream stream(backend);
    Event done;
    for (int i = 0; i < 300; ++i) {
      sides.push_back(std::make_unique<Side>(each_verb(i, static_cast<std::size_t>(i % 7)),
                                             communicator, backend));
      done = sides.back()->start(communicator, {backend, stream});
    }
    backend.host_wait(done);
    for (const auto& side : sides) {
      side->check();
    }
  });
}

TEST_P(CommOrder, ACollectiveReadsWhatTheOneBeforeItWrote) {
  run([](Communicator& communicator, Backend& backend) {
    const auto w = static_cast<std::size_t>(communicator.world());
    const auto own = static_cast<std::size_t>(communicator.rank());
    const OwnStream stream(backend);
    constexpr std::size_t kCount = 1009;
    const GuardedArray full(backend, w * kCount * sizeof(float));
    const std::vector<float> ones(w * kCount, 1.0F);
    backend.copy(full.data(), ones.data(), ones.size() * sizeof(float), kHost);
    const Transfer scatter{full.data(), full.data() + own * kCount * sizeof(float), kCount};
    const Transfer gather{full.data() + own * kCount * sizeof(float), full.data(), kCount};
    constexpr int kRounds = 6;
    Event done;
    for (int i = 0; i < kRounds; ++i) {
      (void)communicator.reduce_scatter({&scatter, 1}, SumOrder::kTree, {backend, stream});
      done = communicator.all_gather({&gather, 1}, {backend, stream});
    }
    backend.host_wait(done);
    float power = 1.0F;
    for (int i = 0; i < kRounds; ++i) {
      power *= static_cast<float>(w);
    }
    const std::vector<float> expected(w * kCount, power);
    expect_bytes(full.read(), std::as_bytes(std::span(expected)), sizeof(float), "chain");
  });
}

TEST_P(CommOrder, OneCommunicatorServesTwoStreams) {
  run([](Communicator& communicator, Backend& backend) {
    std::vector<std::unique_ptr<Side>> sides;
    const OwnStream a(backend);
    const OwnStream b(backend);
    for (int i = 0; i < 40; ++i) {
      sides.push_back(std::make_unique<Side>(each_verb(i, 257), communicator, backend));
      const StreamRef stream = i % 2 == 0 ? a : b;
      if ((i + communicator.rank()) % 5 == 0) {
        delay(backend, stream, milliseconds(1));
      }
      (void)sides.back()->start(communicator, {backend, stream});
    }
    backend.host_wait(backend.record(a));
    backend.host_wait(backend.record(b));
    for (const auto& side : sides) {
      side->check();
    }
  });
}

// Two optimizers in one process: each has a communicator and a stream, and nothing orders them.
TEST_P(CommOrder, TwoCommunicatorsDoNotWaitForEachOther) {
  run([](Communicator& communicator, Backend& backend) {
    const auto other = communicator.split(0, communicator.rank());
    std::vector<std::unique_ptr<Side>> sides;
    const OwnStream a(backend);
    const OwnStream b(backend);
    // Each rank starts with another of the two; a wait of one for the other would be a deadlock.
    const bool swap = communicator.rank() % 2 == 1;
    const auto start = [&](bool first, int i) {
      Communicator& through = first ? communicator : *other;
      sides.push_back(
          std::make_unique<Side>(each_verb(first ? i : i + 100, 1009), through, backend));
      (void)sides.back()->start(through, {backend, first ? StreamRef(a) : StreamRef(b)});
    };
    for (int i = 0; i < 16; ++i) {
      start(!swap, i);
      if (i % 3 == 0) {
        delay(backend, swap ? a : b, milliseconds(1));
      }
      start(swap, i);
    }
    backend.host_wait(backend.record(a));
    backend.host_wait(backend.record(b));
    for (const auto& side : sides) {
      side->check();
    }
  });
}

TEST_P(CommOrder, HostMeetingsDoNotMixWithCollectives) {
  run([](Communicator& communicator, Backend& backend) {
    std::vector<std::unique_ptr<Side>> sides;
    const OwnStream stream(backend);
    for (int i = 0; i < 24; ++i) {
      sides.push_back(std::make_unique<Side>(each_verb(i, 129), communicator, backend));
      (void)sides.back()->start(communicator, {backend, stream});
      const auto mine = static_cast<std::byte>(16 * communicator.rank() + i % 16);
      const auto all = communicator.bootstrap().all_gather({&mine, 1}, long_deadline());
      ASSERT_EQ(all.size(), static_cast<std::size_t>(communicator.world()));
      for (std::size_t r = 0; r < all.size(); ++r) {
        EXPECT_EQ(all[r], std::vector<std::byte>(
                              1, static_cast<std::byte>(16 * static_cast<int>(r) + i % 16)));
      }
    }
    backend.host_wait(backend.record(stream));
    for (const auto& side : sides) {
      side->check();
    }
  });
}

}  // namespace zero::testing
