#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "zero/cpu.h"
#include "zero/error.h"

#include "cpu/compute_pool.h"
#include "cpu/cpu_kernels.h"
#include "cpu/cpu_memory.h"
#include "cpu/cpu_stream.h"
#include "cpu/float_environment.h"

namespace zero {
namespace {

// An array is cut for several threads from this size on: below, waking one costs more.
constexpr std::size_t kPieceElements = 64 * kGranule;

const StreamPoint* point_of(const Event& event) {
  return static_cast<const StreamPoint*>(event.impl.get());
}

bool is_float(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kBfloat16;
}

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(int threads) : pool_(threads) {}

  Buffer allocate(const Allocation& what) override {
    return {*this, memory_.allocate(what.bytes), what, Buffer::Kind::kDevice};
  }
  Buffer allocate_host(const Allocation& what) override {
    return {*this, memory_.allocate(what.bytes), what, Buffer::Kind::kPinned};
  }
  Buffer adopt(void* data, const Allocation& what) override {
    return {*this, data, what, Buffer::Kind::kAdopted};
  }
  void release(Buffer& buffer) noexcept override {
    if (buffer.kind() != Buffer::Kind::kAdopted) {
      memory_.release(buffer.data());
    }
  }

  StreamRef make_stream() override {
    auto stream = std::make_unique<CpuStream>();
    const StreamRef ref{stream.get(), StreamRef::Kind::kCpu};
    const std::lock_guard lock(mutex_);
    streams_.push_back(std::move(stream));
    return ref;
  }
  void release_stream(StreamRef ref) noexcept override {
    std::unique_ptr<CpuStream> gone;  // joined without the lock: its tasks may make streams
    const std::lock_guard lock(mutex_);
    const auto found = std::find_if(streams_.begin(), streams_.end(),
                                    [&](const auto& s) { return s.get() == ref.native; });
    if (found != streams_.end()) {
      gone = std::move(*found);
      streams_.erase(found);
    }
  }
  Event record(StreamRef ref) override {
    return ref.kind == StreamRef::Kind::kHost ? Event{} : Event{stream(ref).record()};
  }
  void wait(StreamRef ref, const Event& event) override {
    if (ref.kind == StreamRef::Kind::kHost) {
      return host_wait(event);
    }
    if (event.impl != nullptr) {
      stream(ref).wait(std::static_pointer_cast<const StreamPoint>(event.impl));
    }
  }
  bool done(const Event& event) override {
    const StreamPoint* const point = point_of(event);
    return point == nullptr || point->progress->reached(point->task);
  }
  void host_wait(const Event& event) override {
    if (const StreamPoint* const point = point_of(event)) {
      point->progress->wait_for(point->task);
    }
  }
  void call(StreamRef ref, std::function<void()> f) override { enqueue(ref, std::move(f)); }

  void copy(void* to, const void* from, std::size_t bytes, StreamRef ref) override;
  void fill(void* to, int byte, std::size_t bytes, StreamRef ref) override;
  void accumulate(void* into, DType into_dtype, const void* from, DType from_dtype,
                  std::size_t count, First first, StreamRef ref) override;
  void sum_tree(void* out, std::span<const void* const> in, DType dtype, std::size_t count,
                StreamRef ref) override;
  void measure(const UpdateArguments& arguments, StreamRef ref) override;
  void prepare(const UpdateArguments& arguments, StreamRef ref) override;
  void update(const UpdateRule& rule, const UpdateArguments& arguments, StreamRef ref) override;

 private:
  [[nodiscard]] static CpuStream& stream(StreamRef ref) {
    require(ref.kind == StreamRef::Kind::kCpu && ref.native != nullptr,
            "a stream of another backend: expected kHost or one of this backend's make_stream()");
    return *static_cast<CpuStream*>(ref.native);
  }
  template <class Task>
  void enqueue(StreamRef ref, Task&& task) {
    if (ref.kind == StreamRef::Kind::kHost) {
      task();
    } else {
      stream(ref).enqueue(std::forward<Task>(task));
    }
  }
  // Calls fn(begin, end) for parts of [0, count) that begin at multiples of `granule`.
  template <class F>
  void for_parts(std::size_t count, std::size_t granule, const F& fn) {
    const std::size_t part = (count / pool_.threads() / granule + 1) * granule;
    pool_.for_pieces((count + part - 1) / part, [&](std::size_t i) {
      const FloatEnvironment environment;
      fn(i * part, std::min(count, (i + 1) * part));
    });
  }
  // Chunks in one piece: several pieces a thread, so that threads end together.
  [[nodiscard]] std::size_t chunks_a_piece(std::size_t chunks) const {
    if (pool_.threads() == 1) {
      return std::max<std::size_t>(chunks, 1);
    }
    return std::clamp<std::size_t>(chunks / (8 * pool_.threads()), 1, 16);
  }
  void measure_now(const UpdateArguments& a);
  void update_now(void (*rule)(const UpdateArguments&, std::size_t, std::size_t),
                  const UpdateArguments& a);

  const Isa isa_ = best_isa();
  CpuMemory memory_;
  ComputePool pool_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<CpuStream>> streams_;  // last: their tasks use all of the above
};

void CpuBackend::copy(void* to, const void* from, std::size_t bytes, StreamRef ref) {
  if (bytes == 0 || to == from) {
    return;
  }
  enqueue(ref, [this, to, from, bytes] {
    for_parts(bytes, sizeof(float) * kPieceElements, [&](std::size_t begin, std::size_t end) {
      std::memcpy(static_cast<std::byte*>(to) + begin, static_cast<const std::byte*>(from) + begin,
                  end - begin);
    });
  });
}

void CpuBackend::fill(void* to, int byte, std::size_t bytes, StreamRef ref) {
  if (bytes == 0) {
    return;
  }
  enqueue(ref, [this, to, byte, bytes] {
    for_parts(bytes, sizeof(float) * kPieceElements, [&](std::size_t begin, std::size_t end) {
      std::memset(static_cast<std::byte*>(to) + begin, byte, end - begin);
    });
  });
}

void CpuBackend::accumulate(void* into, DType into_dtype, const void* from, DType from_dtype,
                            std::size_t count, First first, StreamRef ref) {
  require(is_float(into_dtype) && is_float(from_dtype),
          "accumulate of " + std::string(name_of(from_dtype)) + " into " +
              std::string(name_of(into_dtype)) + ": expected fp32 or bf16");
  require(into != from || into_dtype == from_dtype || count == 0,
          "accumulate from one dtype into another in place: use a second array");
  enqueue(ref, [=, this] {
    for_parts(count, kPieceElements, [&](std::size_t begin, std::size_t end) {
      cpu::accumulate(isa_, {into, into_dtype}, {from, from_dtype}, {begin, end}, first);
    });
  });
}

void CpuBackend::sum_tree(void* out, std::span<const void* const> in, DType dtype,
                          std::size_t count, StreamRef ref) {
  require(is_float(dtype) || dtype == DType::kInt64,
          "sum_tree of " + std::string(name_of(dtype)) + ": expected fp32, bf16 or int64");
  require(!in.empty(), "sum_tree of no arrays: expected at least one");
  const auto sum = [=, this](std::span<const void* const> rows) {
    for_parts(count, kPieceElements, [&](std::size_t begin, std::size_t end) {
      cpu::sum_tree(isa_, out, rows, dtype, {begin, end});
    });
  };
  if (ref.kind == StreamRef::Kind::kHost) {
    sum(in);
  } else {
    stream(ref).enqueue([sum, rows = std::vector(in.begin(), in.end())] { sum(rows); });
  }
}

void CpuBackend::measure(const UpdateArguments& arguments, StreamRef ref) {
  enqueue(ref, [this, arguments] { measure_now(arguments); });
}

void CpuBackend::measure_now(const UpdateArguments& a) {
  const std::size_t piece = chunks_a_piece(a.measured_chunks);
  std::mutex merging;  // the sums are exact: their order does not matter
  pool_.for_pieces((a.measured_chunks + piece - 1) / piece, [&](std::size_t i) {
    const FloatEnvironment environment;
    cpu::Measured found;
    cpu::measure(isa_, a, {i * piece, std::min(a.measured_chunks, (i + 1) * piece)}, found);
    const std::lock_guard lock(merging);
    cpu::add_to_control(a, found);
  });
}

void CpuBackend::prepare(const UpdateArguments& arguments, StreamRef ref) {
  enqueue(ref, [arguments] {
    const FloatEnvironment environment;
    cpu::prepare(arguments);
  });
}

void CpuBackend::update(const UpdateRule& rule, const UpdateArguments& arguments, StreamRef ref) {
  require(rule.cpu != nullptr, "update rule \"" + rule.name +
                                   "\" has no function for the CPU: make it with make_rule()");
  require(rule.between == Between::kNothing,
          "update rule \"" + rule.name + "\" needs more than one pass: not carried on the CPU");
  enqueue(ref, [this, run = rule.cpu, arguments] { update_now(run, arguments); });
}

void CpuBackend::update_now(void (*rule)(const UpdateArguments&, std::size_t, std::size_t),
                            const UpdateArguments& a) {
  if (a.scalars->skip != 0) {
    return;
  }
  const std::size_t piece = chunks_a_piece(a.chunk_count);
  pool_.for_pieces((a.chunk_count + piece - 1) / piece, [&](std::size_t i) {
    const FloatEnvironment environment;
    rule(a, i * piece, std::min(a.chunk_count, (i + 1) * piece));
  });
}

}  // namespace

std::unique_ptr<Ledger> make_cpu_backend(std::uint64_t budget_bytes, int threads) {
  return std::make_unique<Ledger>(std::make_unique<CpuBackend>(threads), budget_bytes);
}

}  // namespace zero
