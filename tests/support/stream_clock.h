// A backend that knows which waits the order between streams stands on, and can leave one out.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "zero/backend.h"

namespace zero::testing {

// How a wait was covered by others; kNeeded: by none.
enum class Cover : std::uint8_t {
  kNeeded,
  kEarlier,  // the stream was already ordered after the point
  kBeside,   // another wait of the stream, before its next work, covers it
};

struct WaitRecord {
  std::size_t stream = 0, source = 0;  // who waits for whom; 0 is the host, others in order made
  std::uint64_t known = 0;             // the work of `source` that `stream` is ordered after
  std::uint64_t point = 0;             // without the wait, and with it
  bool of_test = false;                // the test's own order, not the engine's
  Cover cover = Cover::kNeeded;
  std::string phase{};  // what the test was at
};

// Vector clocks over streams: what each is ordered after, by count of work enqueued on every other.
// Source: Fidge 1988; Mattern 1989
class StreamClocks {
 public:
  using Clock = std::vector<std::uint64_t>;
  struct Point {
    Event inner;
    std::size_t stream = 0;
    std::uint64_t work = 0;
    Clock clock;
  };

  StreamClocks() { (void)add(kHost); }

  std::size_t add(StreamRef stream) {
    streams_.push_back(stream);
    known_.emplace_back();
    pending_.emplace_back();
    return streams_.size() - 1;
  }
  // A stream that was not made here is a mistake of the test.
  [[nodiscard]] std::size_t find(StreamRef stream) const {
    for (std::size_t s = streams_.size(); s-- > 0;) {  // the latest: handles may come again
      if (streams_[s] == stream) {
        return s;
      }
    }
    throw std::logic_error("a stream of another backend");
  }

  // Work is enqueued. Returns: its number on the stream, from 1
  std::uint64_t work(std::size_t s) {
    settle(s);
    join(known_[s], known_[0]);
    return ++at(known_[s], s);
  }
  [[nodiscard]] Point point(std::size_t s) {
    settle(s);
    return {{}, s, at(known_[s], s), known_[s]};
  }
  // Returns: the wait's number, from 0
  std::size_t wait(std::size_t s, const Point& point, bool of_test) {
    join(known_[s], known_[0]);
    waits_.push_back({.stream = s,
                      .source = point.stream,
                      .point = point.work,
                      .of_test = of_test,
                      .phase = phase});
    pending_[s].push_back({waits_.size() - 1, point.clock});
    if (s == 0) {
      settle(s);
    }
    return waits_.size() - 1;
  }
  [[nodiscard]] const std::vector<WaitRecord>& waits() const { return waits_; }

  std::string phase;

 private:
  struct Pending {
    std::size_t number = 0;
    Clock clock;
  };
  static std::uint64_t& at(Clock& clock, std::size_t s) {
    if (clock.size() <= s) {
      clock.resize(s + 1);
    }
    return clock[s];
  }
  static void join(Clock& into, const Clock& from) {
    for (std::size_t s = 0; s < from.size(); ++s) {
      at(into, s) = std::max(at(into, s), from[s]);
    }
  }
  // Work follows: each wait since the work before is either covered without it, or counts.
  void settle(std::size_t s) {
    std::vector<Pending>& pending = pending_[s];
    for (std::size_t i = 0; i < pending.size();) {
      WaitRecord& wait = waits_[pending[i].number];
      Clock others = known_[s];
      const bool earlier = at(others, wait.source) >= wait.point;
      for (std::size_t j = 0; j < pending.size(); ++j) {
        if (j != i) {
          join(others, pending[j].clock);
        }
      }
      wait.known = at(others, wait.source);
      if (wait.known >= wait.point) {
        wait.cover = earlier ? Cover::kEarlier : Cover::kBeside;
        pending.erase(pending.begin() + static_cast<std::ptrdiff_t>(i));
      } else {
        ++i;
      }
    }
    for (const Pending& wait : pending) {
      join(known_[s], wait.clock);
    }
    pending.clear();
  }

  std::vector<StreamRef> streams_;
  std::vector<Clock> known_;  // by stream
  std::vector<std::vector<Pending>> pending_;
  std::vector<WaitRecord> waits_;
};

// What a run leaves out, and where it makes a stream late so that the order shows.
struct WaitFault {
  std::function<bool(std::size_t wait)> dropped{};  // empty: none
  std::size_t late_stream = 0;                      // 0: none
  std::uint64_t late_work = 0;                      // before this work of it; 0: before each
  std::chrono::milliseconds delay{0};
};

// Clocks what the thread that made it enqueues. Work on other threads (the kernels of a collective
// run inside its job) passes by. Streams must be made and used through it.
class ClockedBackend final : public Backend {
 public:
  explicit ClockedBackend(std::unique_ptr<Backend> inner, WaitFault fault = {})
      : inner_(std::move(inner)), fault_(std::move(fault)) {}

  [[nodiscard]] const std::vector<WaitRecord>& waits() const { return clocks_.waits(); }
  void begin_phase(std::string what) { clocks_.phase = std::move(what); }
  // The test's own order between its streams: never dropped.
  void order(StreamRef stream, const Event& event) {
    of_test_ = true;
    wait(stream, event);
    of_test_ = false;
  }

  [[nodiscard]] Buffer allocate(const Allocation& a) override { return inner_->allocate(a); }
  [[nodiscard]] Buffer allocate_host(const Allocation& a) override {
    return inner_->allocate_host(a);
  }
  [[nodiscard]] Buffer adopt(void* p, const Allocation& a) override { return inner_->adopt(p, a); }
  void release(Buffer& b) noexcept override { inner_->release(b); }
  [[nodiscard]] StreamRef make_stream() override {
    const StreamRef stream = inner_->make_stream();
    (void)clocks_.add(stream);
    return stream;
  }
  void release_stream(StreamRef s) noexcept override { inner_->release_stream(s); }

  [[nodiscard]] Event record(StreamRef s) override {
    Event inner = inner_->record(s);
    if (s == kHost || !mine()) {
      return inner;
    }
    auto point = std::make_shared<Point>(clocks_.point(clocks_.find(s)));
    point->inner = std::move(inner);
    return {std::move(point)};
  }
  void wait(StreamRef s, const Event& e) override {
    if (const Point* point = to_wait(s, e)) {
      inner_->wait(s, point->inner);
    }
  }
  [[nodiscard]] bool done(const Event& e) override {
    const bool reached = e.impl == nullptr || inner_->done(inner_of(e));
    polled_ = reached ? e.impl : nullptr;
    return reached;
  }
  // After a poll that said "done" it only asks for the error: when is a matter of time, so it is
  // not numbered.
  void host_wait(const Event& e) override {
    if (e.impl != nullptr && e.impl == polled_) {
      inner_->host_wait(inner_of(e));
    } else if (const Point* point = to_wait(kHost, e)) {
      inner_->host_wait(point->inner);
    }
  }
  void call(StreamRef s, std::function<void()> f) override {
    work(s);
    inner_->call(s, std::move(f));
  }
  void copy(void* to, const void* from, std::size_t bytes, StreamRef s) override {
    work(s);
    inner_->copy(to, from, bytes, s);
  }
  void fill(void* to, int byte, std::size_t bytes, StreamRef s) override {
    work(s);
    inner_->fill(to, byte, bytes, s);
  }
  void accumulate(void* into, DType into_dtype, const void* from, DType from_dtype,
                  std::size_t count, First first, StreamRef s) override {
    work(s);
    inner_->accumulate(into, into_dtype, from, from_dtype, count, first, s);
  }
  void sum_tree(void* out, std::span<const void* const> in, DType dtype, std::size_t count,
                StreamRef s) override {
    work(s);
    inner_->sum_tree(out, in, dtype, count, s);
  }
  void measure(const UpdateArguments& a, StreamRef s) override {
    work(s);
    inner_->measure(a, s);
  }
  void prepare(const UpdateArguments& a, StreamRef s) override {
    work(s);
    inner_->prepare(a, s);
  }
  void update(const UpdateRule& r, const UpdateArguments& a, StreamRef s) override {
    work(s);
    inner_->update(r, a, s);
  }

 private:
  using Point = StreamClocks::Point;
  [[nodiscard]] bool mine() const { return std::this_thread::get_id() == owner_; }
  [[nodiscard]] static const Point* point_of(const Event& e) {
    return static_cast<const Point*>(e.impl.get());
  }
  [[nodiscard]] static Event inner_of(const Event& e) {
    return e.impl == nullptr ? Event{} : point_of(e)->inner;
  }

  void work(StreamRef s) {
    if (!mine()) {
      return;
    }
    const std::size_t stream = clocks_.find(s);
    const std::uint64_t number = clocks_.work(stream);
    const bool late = fault_.late_work == 0 || fault_.late_work == number;
    if (stream != 0 && stream == fault_.late_stream && late) {
      inner_->call(s, [delay = fault_.delay] { std::this_thread::sleep_for(delay); });
    }
  }
  // Null: an empty event, or a wait to be left out.
  [[nodiscard]] const Point* to_wait(StreamRef s, const Event& e) {
    const Point* point = point_of(e);
    if (point == nullptr || !mine()) {
      return point;
    }
    const std::size_t number = clocks_.wait(clocks_.find(s), *point, of_test_);
    return !of_test_ && fault_.dropped && fault_.dropped(number) ? nullptr : point;
  }

  std::unique_ptr<Backend> inner_;
  const WaitFault fault_;
  StreamClocks clocks_;
  std::shared_ptr<const void> polled_;
  bool of_test_ = false;
  const std::thread::id owner_ = std::this_thread::get_id();
};

}  // namespace zero::testing
