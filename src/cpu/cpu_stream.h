// A stream of the CPU backend: a thread and a FIFO. Its first error poisons it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <thread>

namespace zero {

// How far a stream has come; events share it, so it outlives the stream. Tasks count from 1.
class StreamProgress {
 public:
  [[nodiscard]] bool reached(std::uint64_t task) const { return completed_.load() >= task; }
  [[nodiscard]] bool failed_by(std::uint64_t task) const { return failed_at_.load() <= task; }
  // Blocks until the task is done. Throws: what poisoned the stream at or before it
  void wait_for(std::uint64_t task);
  // Runs the next task, or drops it in a poisoned stream, and destroys it. For the stream's thread
  // only.
  void run(std::function<void()>& task) noexcept;

 private:
  static constexpr std::uint64_t kNever = std::numeric_limits<std::uint64_t>::max();

  std::atomic<std::uint64_t> completed_{0};
  std::atomic<std::uint64_t> failed_at_{kNever};
  std::atomic<int> waiting_{0};
  std::exception_ptr error_;  // written before failed_at_, read after it
  std::mutex mutex_;
  std::condition_variable advanced_;
};

// What an Event of the CPU backend points to: the end of a task.
struct StreamPoint {
  std::shared_ptr<StreamProgress> progress;
  std::uint64_t task = 0;
};

class CpuStream {
 public:
  CpuStream();
  CpuStream(const CpuStream&) = delete;
  CpuStream& operator=(const CpuStream&) = delete;
  ~CpuStream();  // finishes what is enqueued

  void enqueue(std::function<void()> task);
  [[nodiscard]] std::shared_ptr<const StreamPoint> record();
  // Costs nothing when the point has been reached, or is the stream's own.
  void wait(std::shared_ptr<const StreamPoint> point);

 private:
  void work();

  std::shared_ptr<StreamProgress> progress_;
  std::mutex mutex_;
  std::condition_variable enqueued_;
  std::deque<std::function<void()>> queue_;
  std::uint64_t count_ = 0;  // tasks enqueued so far
  std::shared_ptr<const StreamPoint> latest_;
  bool idle_ = false;  // the thread sleeps
  bool stop_ = false;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace zero
