#include "cpu/cpu_stream.h"

#include <string>
#include <system_error>
#include <utility>

#include "zero/error.h"

#include "cpu/float_environment.h"

namespace zero {

void StreamProgress::wait_for(std::uint64_t task) {
  if (!reached(task)) {
    std::unique_lock lock(mutex_);
    // Before the check: run() looks for waiters after it has advanced, so one sees the other.
    ++waiting_;
    advanced_.wait(lock, [&] { return reached(task); });
    --waiting_;
  }
  if (failed_by(task)) {
    std::rethrow_exception(error_);
  }
}

void StreamProgress::run(std::function<void()>& task) noexcept {
  const std::uint64_t number = completed_.load() + 1;
  if (failed_at_.load() == kNever) {
    try {
      task();
    } catch (...) {
      error_ = std::current_exception();
      failed_at_.store(number);
    }
  }
  task = nullptr;  // what it holds is gone when its event is reached
  completed_.store(number);
  if (waiting_.load() > 0) {
    const std::lock_guard lock(mutex_);
    advanced_.notify_all();
  }
}

CpuStream::CpuStream() : progress_(std::make_shared<StreamProgress>()) {
  try {
    thread_ = std::thread([this] { work(); });
  } catch (const std::system_error& e) {
    throw Error(std::string("no thread for a stream: ") + e.what() +
                "; use fewer streams, or raise the limit on threads (ulimit -u)");
  }
}

CpuStream::~CpuStream() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  enqueued_.notify_one();
  thread_.join();
}

void CpuStream::enqueue(std::function<void()> task) {
  bool wake = false;
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(task));
    ++count_;
    wake = idle_;
  }
  if (wake) {
    enqueued_.notify_one();
  }
}

std::shared_ptr<const StreamPoint> CpuStream::record() {
  const std::lock_guard lock(mutex_);
  if (latest_ == nullptr || latest_->task != count_) {
    latest_ = std::make_shared<const StreamPoint>(StreamPoint{progress_, count_});
  }
  return latest_;
}

void CpuStream::wait(std::shared_ptr<const StreamPoint> point) {
  const StreamProgress& other = *point->progress;
  const bool passed = other.reached(point->task) && !other.failed_by(point->task);
  if (!passed && point->progress != progress_) {
    enqueue([p = std::move(point)] { p->progress->wait_for(p->task); });
  }
}

void CpuStream::work() {
  const FloatEnvironment environment;
  std::deque<std::function<void()>> batch;
  std::unique_lock lock(mutex_);
  while (true) {
    idle_ = true;
    enqueued_.wait(lock, [&] { return stop_ || !queue_.empty(); });
    idle_ = false;
    if (queue_.empty()) {
      return;
    }
    batch.swap(queue_);
    lock.unlock();
    for (; !batch.empty(); batch.pop_front()) {
      progress_->run(batch.front());
    }
    lock.lock();
  }
}

}  // namespace zero
