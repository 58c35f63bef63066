// A rank's compute threads: run numbered tasks, in any order, and wait for all.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace gpt {

class Pool {
 public:
  // The calling thread of run() is one of `threads`.
  explicit Pool(int threads);
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  ~Pool();

  [[nodiscard]] std::size_t threads() const { return workers_.size() + 1; }

  // Calls task(index, thread) for each index below `count`, thread below threads().
  // Requires: task does not throw and does not depend on the thread but for scratch memory
  template <class Task>
  void run(std::size_t count, Task&& task) {
    using Bare = std::remove_reference_t<Task>;
    const auto call = [](const void* t, std::size_t index, std::size_t thread) noexcept {
      (*static_cast<const Bare*>(t))(index, thread);
    };
    run_erased({&task, call, count});
  }

 private:
  void stop() noexcept;  // ends and joins the workers
  struct Job {
    const void* task = nullptr;
    void (*call)(const void*, std::size_t, std::size_t) noexcept = nullptr;
    std::size_t count = 0;
  };
  void run_erased(const Job& job);
  void work(std::size_t thread);
  void take_tasks(const Job& job, std::size_t thread);

  std::atomic<std::size_t> next_{0};
  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  Job job_;
  std::size_t round_ = 0, busy_ = 0;
  bool stop_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace gpt
