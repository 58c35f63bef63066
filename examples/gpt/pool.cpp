#include "gpt/pool.h"

#include <stdexcept>
#include <string>

namespace gpt {

Pool::Pool(int threads) {
  try {
    for (int t = 1; t < threads; ++t) {
      workers_.emplace_back([this, t] { work(static_cast<std::size_t>(t)); });
    }
  } catch (const std::exception& error) {
    stop();
    throw std::runtime_error("--threads " + std::to_string(threads) + ": a thread was refused (" +
                             error.what() + "); use fewer, or raise the limit (ulimit -u)");
  }
}

Pool::~Pool() {
  stop();
}

void Pool::stop() noexcept {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) {
    worker.join();
  }
}

void Pool::take_tasks(const Job& job, std::size_t thread) {
  for (std::size_t i = next_.fetch_add(1); i < job.count; i = next_.fetch_add(1)) {
    job.call(job.task, i, thread);
  }
}

void Pool::run_erased(const Job& job) {
  if (workers_.empty() || job.count <= 1) {
    for (std::size_t i = 0; i < job.count; ++i) {
      job.call(job.task, i, 0);
    }
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    job_ = job;
    next_ = 0;
    busy_ = workers_.size();
    ++round_;
  }
  wake_.notify_all();
  take_tasks(job, 0);
  std::unique_lock lock(mutex_);
  idle_.wait(lock, [&] { return busy_ == 0; });
}

void Pool::work(std::size_t thread) {
  std::size_t seen = 0;
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [&] { return stop_ || round_ != seen; });
    if (stop_) {
      return;
    }
    seen = round_;
    const Job job = job_;
    lock.unlock();
    take_tasks(job, thread);
    lock.lock();
    if (--busy_ == 0) {
      idle_.notify_one();
    }
  }
}

}  // namespace gpt
