// Threads that help a stream with the pieces of one kernel.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace zero {

class ComputePool {
 public:
  // The caller of for_pieces computes too, so one thread needs no other.
  explicit ComputePool(int threads);
  ComputePool(const ComputePool&) = delete;
  ComputePool& operator=(const ComputePool&) = delete;
  ~ComputePool();

  [[nodiscard]] std::size_t threads() const { return threads_.size() + 1; }

  // Calls fn(piece) for each piece below `count`, in any order, and returns when all are done.
  // Throws: the first error of a piece, after the others that had begun
  template <class F>
  void for_pieces(std::size_t count, const F& fn) {
    if (count <= 1 || threads_.empty()) {
      for (std::size_t piece = 0; piece < count; ++piece) {
        fn(piece);
      }
      return;
    }
    Job job;
    job.count = count;
    job.fn = &fn;
    job.call = [](const void* f, std::size_t piece) { (*static_cast<const F*>(f))(piece); };
    run(job);
  }

 private:
  struct Job {
    std::size_t count = 0;
    const void* fn = nullptr;
    void (*call)(const void*, std::size_t) = nullptr;
    std::atomic<std::size_t> next{0};
    std::size_t helpers = 0;  // at work on it; guarded by mutex_, as is error
    std::exception_ptr error;
  };
  void stop() noexcept;
  void run(Job& job);
  void take_pieces(Job& job);
  void work();

  std::mutex mutex_;
  std::condition_variable offered_, left_;
  std::deque<Job*> jobs_;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace zero
