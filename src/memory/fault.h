// Backends around a backend that fail, forget or dawdle on purpose: for tests of what stands on
// them.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>

#include "zero/backend.h"

namespace zero {

// Does what the inner backend does. Buffers are its own, so that a release passes through it too.
class ForwardingBackend : public Backend {
 public:
  // Throws: UsageError for null
  explicit ForwardingBackend(std::unique_ptr<Backend> inner);

  [[nodiscard]] Backend& inner() { return *inner_; }

  [[nodiscard]] Buffer allocate(const Allocation& what) override;
  [[nodiscard]] Buffer allocate_host(const Allocation& what) override;
  [[nodiscard]] Buffer adopt(void* data, const Allocation& what) override;
  void release(Buffer& buffer) noexcept override;

  [[nodiscard]] StreamRef make_stream() override;
  void release_stream(StreamRef stream) noexcept override;
  [[nodiscard]] Event record(StreamRef stream) override;
  void wait(StreamRef stream, const Event& event) override;
  [[nodiscard]] bool done(const Event& event) override;
  void host_wait(const Event& event) override;
  void call(StreamRef stream, std::function<void()> f) override;

  void copy(void* to, const void* from, std::size_t bytes, StreamRef stream) override;
  void fill(void* to, int byte, std::size_t bytes, StreamRef stream) override;
  void accumulate(void* into, DType into_dtype, const void* from, DType from_dtype,
                  std::size_t count, First first, StreamRef stream) override;
  void sum_tree(void* out, std::span<const void* const> in, DType dtype, std::size_t count,
                StreamRef stream) override;
  void measure(const UpdateArguments& arguments, StreamRef stream) override;
  void prepare(const UpdateArguments& arguments, StreamRef stream) override;
  void update(const UpdateRule& rule, const UpdateArguments& arguments, StreamRef stream) override;

 protected:
  // Called before the inner backend is: of each allocation, and of each verb that has work to do
  // on a stream (call and the kernels; kHost too).
  virtual void before_allocation() {}
  virtual void before_task(StreamRef) {}

 private:
  Buffer own(Buffer buffer);

  std::unique_ptr<Backend> inner_;
};

inline constexpr std::uint64_t kNeverFails = std::numeric_limits<std::uint64_t>::max();

// Fails once. Numbers count from 0; a loop over k ends when the counters stay below it.
class FaultBackend final : public ForwardingBackend {
 public:
  struct Faults {
    std::uint64_t allocation = kNeverFails;  // throws OutOfMemory (allocate_host and adopt count)
    std::uint64_t task = kNeverFails;        // throws Error in the stream, on kHost at once
  };
  FaultBackend(std::unique_ptr<Backend> inner, Faults faults);

  [[nodiscard]] std::uint64_t allocations() const { return allocations_; }
  [[nodiscard]] std::uint64_t tasks() const { return tasks_; }

 private:
  void before_allocation() override;
  void before_task(StreamRef stream) override;

  Faults faults_;
  std::atomic<std::uint64_t> allocations_{0}, tasks_{0};
};

// Forgets the wait number `dropped`, counted from 0 over calls of wait() with an event that is
// not empty: so a collective's `after` counts, where the communicator waits for it.
class DropWait final : public ForwardingBackend {
 public:
  DropWait(std::unique_ptr<Backend> inner, std::uint64_t dropped);

  [[nodiscard]] std::uint64_t waits() const { return waits_; }

  void wait(StreamRef stream, const Event& event) override;

 private:
  std::uint64_t dropped_;
  std::atomic<std::uint64_t> waits_{0};
};

// Sleeps in the stream before some of the tasks, so that a missing wait shows. Which ones and how
// long depends on the seed and on the order in which tasks are enqueued.
class SlowBackend final : public ForwardingBackend {
 public:
  SlowBackend(std::unique_ptr<Backend> inner, std::uint64_t seed, std::chrono::microseconds most);

 private:
  void before_task(StreamRef stream) override;

  std::uint64_t seed_;
  std::chrono::microseconds most_;
  std::atomic<std::uint64_t> tasks_{0};
};

}  // namespace zero
