#include "memory/fault.h"

#include <gtest/gtest.h>

#include "zero/cpu.h"

#include "tests/memory/kernel_suite.h"
#include "tests/memory/step_suite.h"

namespace zero::testing {
namespace {

struct ForwardingFactory {
  static std::unique_ptr<Backend> make() {
    return std::make_unique<ForwardingBackend>(make_cpu_backend());
  }
};
struct SlowFactory {
  static std::unique_ptr<Backend> make() {
    return std::make_unique<SlowBackend>(make_cpu_backend(), 1, std::chrono::microseconds(100));
  }
};
INSTANTIATE_TYPED_TEST_SUITE_P(Forwarding, BackendSuite, ForwardingFactory);
INSTANTIATE_TYPED_TEST_SUITE_P(Forwarding, KernelSuite, ForwardingFactory);
INSTANTIATE_TYPED_TEST_SUITE_P(Forwarding, StepSuite, ForwardingFactory);
INSTANTIATE_TYPED_TEST_SUITE_P(Slow, BackendSuite, SlowFactory);

// Two allocations, and three tasks on each of two streams, the second behind the first.
std::string small_program(Backend& backend) {
  std::string error;
  const StreamRef first = backend.make_stream(), second = backend.make_stream();
  try {
    const Buffer a = backend.allocate({256, Category::kUser});
    const Buffer b = backend.allocate({256, Category::kUser});
    backend.fill(a.data(), 3, 256, first);
    backend.copy(b.data(), a.data(), 256, first);
    backend.call(first, [] {});
    backend.wait(second, backend.record(first));
    backend.accumulate(b.data(), DType::kFloat32, a.data(), DType::kFloat32, 64, First::kNo,
                       second);
    backend.copy(a.data(), b.data(), 256, second);
    backend.call(second, [] {});
    error = error_of(backend, backend.record(second));
  } catch (const Error& e) {
    error = e.what();
  }
  backend.release_stream(first);
  backend.release_stream(second);
  return error;
}

TEST(FaultBackend, FailsEachAllocationInTurnAndThenNone) {
  std::uint64_t k = 0;
  for (;; ++k) {
    FaultBackend backend(make_cpu_backend(), {.allocation = k});
    const std::string error = small_program(backend);
    if (backend.allocations() <= k) {
      EXPECT_EQ(error, "");
      break;
    }
    EXPECT_EQ(error, "injected: allocation " + std::to_string(k) + " fails");
  }
  EXPECT_EQ(k, 2U);
}

TEST(FaultBackend, FailsEachTaskInTurnAndThenNone) {
  std::uint64_t k = 0;
  for (;; ++k) {
    FaultBackend backend(make_cpu_backend(), {.task = k});
    const std::string error = small_program(backend);
    if (backend.tasks() <= k) {
      EXPECT_EQ(error, "");
      break;
    }
    EXPECT_EQ(error, "injected: task " + std::to_string(k) + " fails") << "over both streams";
  }
  EXPECT_EQ(k, 6U);
}

TEST(FaultBackend, FailsATaskOnTheHostAtOnce) {
  FaultBackend backend(make_cpu_backend(), {.task = 1});
  EXPECT_NO_THROW(backend.call(kHost, [] {}));
  EXPECT_THROW(backend.call(kHost, [] {}), Error);
  EXPECT_NO_THROW(backend.call(kHost, [] {}));
}

TEST(DropWait, ForgetsOneWaitAndCountsThemAll) {
  DropWait backend(make_cpu_backend(), 1);
  const StreamRef streams[] = {backend.make_stream(), backend.make_stream()};
  Gate gate;
  gate.close(backend, streams[0]);
  const Event closed = backend.record(streams[0]);
  backend.wait(streams[1], backend.record(kHost));
  EXPECT_EQ(backend.waits(), 0U) << "there is nothing to wait for";
  backend.wait(streams[1], backend.record(streams[1]));
  backend.wait(streams[1], closed);
  bool ran = false;
  backend.call(streams[1], [&] { ran = true; });
  backend.host_wait(backend.record(streams[1]));
  EXPECT_TRUE(ran) << "the wait number 1 is gone";
  EXPECT_EQ(backend.waits(), 2U);
  backend.wait(streams[1], closed);
  EXPECT_EQ(backend.waits(), 3U);
  const Event behind = backend.record(streams[1]);
  EXPECT_FALSE(backend.done(behind));
  gate.open();
  backend.host_wait(behind);
  backend.release_stream(streams[0]);
  backend.release_stream(streams[1]);
}

TEST(DropWait, ForgetsWaitsOfTheHostToo) {
  DropWait backend(make_cpu_backend(), 0);
  const StreamRef stream = backend.make_stream();
  backend.call(stream, [] { throw Error("seen by the second wait"); });
  const Event event = backend.record(stream);
  EXPECT_NO_THROW(backend.wait(kHost, event));
  EXPECT_THROW(backend.wait(kHost, event), Error);
  backend.release_stream(stream);
}

// How long 20 calls take; half of them or so sleep up to `most`.
std::chrono::nanoseconds time_of(std::chrono::milliseconds most, bool on_host) {
  SlowBackend backend(make_cpu_backend(), 2, most);
  const StreamRef stream = on_host ? kHost : backend.make_stream();
  const auto begin = std::chrono::steady_clock::now();
  std::vector<int> order;
  for (int i = 0; i < 20; ++i) {
    backend.call(stream, [&order, i] { order.push_back(i); });
  }
  backend.host_wait(backend.record(stream));
  EXPECT_EQ(order.size(), 20U);
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
  backend.release_stream(stream);
  return std::chrono::steady_clock::now() - begin;
}

TEST(SlowBackend, DelaysStreams) {
  EXPECT_GT(time_of(std::chrono::milliseconds(5), false), std::chrono::milliseconds(5));
}

TEST(SlowBackend, DoesNotDelayTheHost) {
  EXPECT_LT(time_of(std::chrono::seconds(20), true), std::chrono::seconds(10));
}

}  // namespace
}  // namespace zero::testing
