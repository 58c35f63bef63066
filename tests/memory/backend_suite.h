// What every Backend promises of memory, streams and events. A factory is a type with
// `static std::unique_ptr<Backend> make()`; device memory is touched through the backend only.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <future>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "zero/backend.h"
#include "zero/error.h"

#include "tests/memory/arrays.h"

namespace zero::testing {

// Holds a stream up until it is opened; opens itself at the end, so that no test can hang.
class Gate {
 public:
  Gate() : opened_(promise_.get_future()) {}
  ~Gate() { open(); }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;
  void close(Backend& backend, StreamRef stream) {
    backend.call(stream, [opened = opened_] { opened.wait(); });
  }
  void open() {
    if (!std::exchange(open_, true)) {
      promise_.set_value();
    }
  }

 private:
  std::promise<void> promise_;
  std::shared_future<void> opened_;
  bool open_ = false;
};

template <class Factory>
class BackendSuite : public ::testing::Test {
 protected:
  std::unique_ptr<Backend> owner_ = Factory::make();
  Backend& backend_ = *owner_;
};
TYPED_TEST_SUITE_P(BackendSuite);

TYPED_TEST_P(BackendSuite, HandsOutMemoryAlignedTo256Bytes) {
  std::vector<Buffer> buffers;
  for (const std::size_t bytes : {1UL, 3UL, 255UL, 256UL, 70'001UL, 1UL << 20, (9UL << 20) + 7}) {
    buffers.push_back(this->backend_.allocate({bytes, Category::kUser}));
    buffers.push_back(this->backend_.allocate_host({bytes, Category::kUser}));
  }
  for (const Buffer& b : buffers) {
    EXPECT_NE(b.data(), nullptr);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(b.data()) % 256, 0U) << b.bytes();
  }
}

TYPED_TEST_P(BackendSuite, NeverHandsOutOneByteTwice) {
  std::vector<Buffer> buffers;
  for (int i = 0; i < 40; ++i) {
    const auto bytes = static_cast<std::size_t>(1 + i * i * 400);
    buffers.push_back(this->backend_.allocate({bytes, Category::kUser}));
    this->backend_.fill(buffers.back().data(), i, bytes, kHost);
  }
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    const std::vector<unsigned char> expected(buffers[i].bytes(), static_cast<unsigned char>(i));
    EXPECT_EQ(download<unsigned char>(this->backend_, buffers[i]), expected);
  }
}

TYPED_TEST_P(BackendSuite, AllowsAllocationsAndWorkOfZeroBytes) {
  Backend& backend = this->backend_;
  const Buffer none = backend.allocate({0, Category::kUser});
  const Buffer pinned = backend.allocate_host({0, Category::kUser});
  const void* const in[] = {none.data(), none.data()};
  const StreamRef stream = backend.make_stream();
  for (const StreamRef on : {kHost, stream}) {
    backend.copy(none.data(), pinned.data(), 0, on);
    backend.fill(none.data(), 1, 0, on);
    backend.accumulate(none.data(), DType::kFloat32, nullptr, DType::kBfloat16, 0, First::kNo, on);
    backend.sum_tree(none.data(), in, DType::kFloat32, 0, on);
  }
  EXPECT_EQ(error_of(backend, backend.record(stream)), "");
  backend.release_stream(stream);
}

TYPED_TEST_P(BackendSuite, LeavesAdoptedMemoryToItsOwner) {
  Buffer mine = this->backend_.allocate({4096, Category::kUser});
  {
    const Buffer adopted = this->backend_.adopt(mine.data(), {4096, Category::kStates});
    EXPECT_EQ(adopted.data(), mine.data());
    EXPECT_EQ(adopted.kind(), Buffer::Kind::kAdopted);
  }
  this->backend_.fill(mine.data(), 5, 4096, kHost);
  EXPECT_EQ(download<unsigned char>(this->backend_, mine), std::vector<unsigned char>(4096, 5));
}

TYPED_TEST_P(BackendSuite, RunsAStreamInTheOrderOfItsCalls) {
  Backend& backend = this->backend_;
  const StreamRef stream = backend.make_stream();
  EXPECT_NE(stream, kHost);
  std::vector<int> seen, expected(1000);
  std::iota(expected.begin(), expected.end(), 0);
  for (const int i : expected) {
    backend.call(stream, [&seen, i] { seen.push_back(i); });
  }
  backend.host_wait(backend.record(stream));
  EXPECT_EQ(seen, expected);
  backend.release_stream(stream);
}

TYPED_TEST_P(BackendSuite, ReturnsBeforeTheWorkOfAStreamIsDone) {
  Backend& backend = this->backend_;
  Gate gate;
  const StreamRef first = backend.make_stream(), second = backend.make_stream();
  gate.close(backend, first);
  bool ran = false;
  backend.call(first, [&] { ran = true; });
  const Event event = backend.record(first);
  backend.wait(second, event);
  const Event behind = backend.record(second);
  EXPECT_FALSE(backend.done(event));
  EXPECT_FALSE(backend.done(behind));
  gate.open();
  backend.host_wait(behind);
  EXPECT_TRUE(backend.done(event));
  EXPECT_TRUE(backend.done(behind));
  EXPECT_TRUE(ran);
  backend.release_stream(first);
  backend.release_stream(second);
}

TYPED_TEST_P(BackendSuite, OrdersTheWorkOfTwoStreamsByEvents) {
  Backend& backend = this->backend_;
  const StreamRef streams[] = {backend.make_stream(), backend.make_stream()};
  std::vector<int> seen;  // no lock: events alone order the two streams
  for (int i = 0; i < 300; ++i) {
    const StreamRef stream = streams[i % 2];
    backend.call(stream, [&seen, i] { seen.push_back(i); });
    const Event event = backend.record(stream);
    const Event copy = event;
    backend.wait(streams[(i + 1) % 2], copy);
  }
  backend.wait(kHost, backend.record(streams[1]));
  ASSERT_EQ(seen.size(), 300U);
  EXPECT_TRUE(std::is_sorted(seen.begin(), seen.end()));
  backend.release_stream(streams[0]);
  backend.release_stream(streams[1]);
}

TYPED_TEST_P(BackendSuite, DoesWorkOnTheHostBeforeItReturns) {
  Backend& backend = this->backend_;
  const std::thread::id me = std::this_thread::get_id();
  std::thread::id seen;
  backend.call(kHost, [&] { seen = std::this_thread::get_id(); });
  EXPECT_EQ(seen, me);
  const Event event = backend.record(kHost);
  EXPECT_TRUE(backend.done(event));
  EXPECT_TRUE(backend.done(Event{}));
  EXPECT_EQ(error_of(backend, event), "");
  EXPECT_EQ(error_of(backend, Event{}), "");
  const StreamRef stream = backend.make_stream();
  backend.wait(stream, event);
  backend.wait(kHost, event);
  EXPECT_THROW(backend.call(kHost, [] { throw UsageError("at once"); }), UsageError);
  EXPECT_EQ(error_of(backend, backend.record(stream)), "");
  backend.release_stream(stream);
}

TYPED_TEST_P(BackendSuite, FinishesWhatIsEnqueuedBeforeAStreamGoes) {
  Backend& backend = this->backend_;
  int done = 0;
  Event last;
  {
    const StreamRef stream = backend.make_stream();
    for (int i = 0; i < 100; ++i) {
      backend.call(stream, [&done] {
        std::this_thread::sleep_for(std::chrono::microseconds(20));
        ++done;
      });
    }
    last = backend.record(stream);
    backend.release_stream(stream);
  }
  EXPECT_EQ(done, 100);
  EXPECT_TRUE(backend.done(last));
  EXPECT_EQ(error_of(backend, last), "");
}

TYPED_TEST_P(BackendSuite, FinishesStreamsThatNobodyReleased) {
  int done = 0;
  {
    const std::unique_ptr<Backend> backend = TypeParam::make();
    const StreamRef first = backend->make_stream(), second = backend->make_stream();
    backend->call(second, [&done] {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      ++done;
    });
    backend->wait(first, backend->record(second));
    backend->call(first, [&done] { ++done; });
  }
  EXPECT_EQ(done, 2);
}

TYPED_TEST_P(BackendSuite, KeepsTheFirstErrorAndDropsLaterWork) {
  Backend& backend = this->backend_;
  const StreamRef stream = backend.make_stream();
  const Event before = backend.record(stream);
  backend.call(stream, [] { throw UsageError("first"); });
  bool ran = false;
  backend.call(stream, [&] { ran = true; });
  backend.call(stream, [] { throw UsageError("second"); });
  const Event after = backend.record(stream);
  EXPECT_EQ(error_of(backend, after), "first");
  EXPECT_EQ(error_of(backend, after), "first") << "an error is not used up";
  EXPECT_EQ(error_of(backend, backend.record(stream)), "first");
  EXPECT_TRUE(backend.done(after));
  EXPECT_FALSE(ran);
  EXPECT_THROW(backend.wait(kHost, after), UsageError);
  EXPECT_TRUE(backend.done(before));
  backend.release_stream(stream);
  EXPECT_EQ(error_of(backend, after), "first") << "an event outlives its stream";
}

TYPED_TEST_P(BackendSuite, PoisonsAStreamThatWaitsForAPoisonedOne) {
  Backend& backend = this->backend_;
  Gate gate;
  const StreamRef s[] = {backend.make_stream(), backend.make_stream(), backend.make_stream()};
  gate.close(backend, s[0]);
  backend.call(s[0], [] { throw UsageError("upstream"); });
  bool ran = false;
  int independent = 0;
  backend.wait(s[1], backend.record(s[0]));
  backend.call(s[1], [&] { ran = true; });
  backend.call(s[2], [&] { ++independent; });
  backend.host_wait(backend.record(s[2]));
  gate.open();
  EXPECT_EQ(error_of(backend, backend.record(s[1])), "upstream");
  backend.wait(s[2], backend.record(s[1]));  // reached by now, and poisoned all the same
  backend.call(s[2], [&] { ++independent; });
  EXPECT_EQ(error_of(backend, backend.record(s[2])), "upstream");
  EXPECT_FALSE(ran);
  EXPECT_EQ(independent, 1);
  for (const StreamRef stream : s) {
    backend.release_stream(stream);
  }
}

TYPED_TEST_P(BackendSuite, WaitsForItsOwnEventsAndForManyWaiters) {
  Backend& backend = this->backend_;
  const StreamRef stream = backend.make_stream();
  Gate gate;
  gate.close(backend, stream);
  backend.wait(stream, backend.record(stream));
  const Event event = backend.record(stream);
  std::atomic<int> passed{0};
  std::vector<std::thread> waiters;
  for (int i = 0; i < 4; ++i) {
    waiters.emplace_back([&] {
      backend.host_wait(event);
      ++passed;
    });
  }
  EXPECT_EQ(passed, 0);
  gate.open();
  for (std::thread& waiter : waiters) {
    waiter.join();
  }
  EXPECT_EQ(passed, 4);
  backend.release_stream(stream);
}

TYPED_TEST_P(BackendSuite, DestroysATaskBeforeItsEventIsReached) {
  Backend& backend = this->backend_;
  const StreamRef stream = backend.make_stream();
  const auto held = std::make_shared<int>(1);
  for (int i = 0; i < 50; ++i) {
    backend.call(stream, [held] {});
    backend.host_wait(backend.record(stream));
    EXPECT_EQ(held.use_count(), 1);
  }
  backend.release_stream(stream);
}

REGISTER_TYPED_TEST_SUITE_P(BackendSuite, HandsOutMemoryAlignedTo256Bytes,
                            NeverHandsOutOneByteTwice, AllowsAllocationsAndWorkOfZeroBytes,
                            LeavesAdoptedMemoryToItsOwner, RunsAStreamInTheOrderOfItsCalls,
                            ReturnsBeforeTheWorkOfAStreamIsDone, OrdersTheWorkOfTwoStreamsByEvents,
                            DoesWorkOnTheHostBeforeItReturns,
                            FinishesWhatIsEnqueuedBeforeAStreamGoes,
                            FinishesStreamsThatNobodyReleased, KeepsTheFirstErrorAndDropsLaterWork,
                            PoisonsAStreamThatWaitsForAPoisonedOne,
                            WaitsForItsOwnEventsAndForManyWaiters,
                            DestroysATaskBeforeItsEventIsReached);

}  // namespace zero::testing
