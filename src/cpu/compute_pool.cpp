#include "cpu/compute_pool.h"

#include <string>
#include <system_error>

#include "zero/error.h"

#include "cpu/float_environment.h"

namespace zero {

ComputePool::ComputePool(int threads) {
  require(threads >= 1,
          "CPU backend with " + std::to_string(threads) + " compute threads: expected at least 1");
  for (int i = 1; i < threads; ++i) {
    try {
      threads_.emplace_back([this] { work(); });
    } catch (const std::system_error& e) {
      const std::string why = e.what();
      stop();
      throw Error("no thread for the CPU backend's pool of " + std::to_string(threads) + ": " +
                  why + "; use fewer, or raise the limit on threads (ulimit -u)");
    }
  }
}

ComputePool::~ComputePool() {
  stop();
}

void ComputePool::stop() noexcept {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  offered_.notify_all();
  for (std::thread& thread : threads_) {
    thread.join();
  }
}

void ComputePool::run(Job& job) {
  {
    const std::lock_guard lock(mutex_);
    jobs_.push_back(&job);
  }
  offered_.notify_all();
  take_pieces(job);
  std::unique_lock lock(mutex_);
  std::erase(jobs_, &job);
  left_.wait(lock, [&] { return job.helpers == 0; });
  if (job.error != nullptr) {
    std::rethrow_exception(job.error);
  }
}

void ComputePool::take_pieces(Job& job) {
  const FloatEnvironment environment;
  for (std::size_t piece = job.next++; piece < job.count; piece = job.next++) {
    try {
      job.call(job.fn, piece);
    } catch (...) {
      job.next = job.count;
      const std::lock_guard lock(mutex_);
      if (job.error == nullptr) {
        job.error = std::current_exception();
      }
    }
  }
}

void ComputePool::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    offered_.wait(lock, [&] { return stop_ || !jobs_.empty(); });
    if (stop_) {
      return;
    }
    Job& job = *jobs_.front();
    ++job.helpers;
    lock.unlock();
    take_pieces(job);
    lock.lock();
    std::erase(jobs_, &job);  // no pieces are left: others need not look at it
    if (--job.helpers == 0) {
      left_.notify_all();
    }
  }
}

}  // namespace zero
