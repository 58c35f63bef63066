// A device as the engine sees it: memory, streams, events and a handful of kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>

#include "zero/dtype.h"
#include "zero/plan.h"
#include "zero/update_arguments.h"

namespace zero {

// A point in a stream. Empty: already reached. Copies share the point.
struct Event {
  std::shared_ptr<const void> impl;
};

// A queue of work, by value; whoever made it owns it. kHost is the calling thread: work handed
// over on it is already done, and work done "on" it is done before the call returns.
struct StreamRef {
  enum class Kind : std::uint8_t { kHost, kCpu, kCuda };
  void* native = nullptr;
  Kind kind = Kind::kHost;
  friend bool operator==(const StreamRef&, const StreamRef&) = default;
};
inline constexpr StreamRef kHost{};

// How much of what; `padding` of the bytes count as Category::kPadding instead.
struct Allocation {
  std::size_t bytes = 0;
  Category category = Category::kUser;
  std::size_t padding = 0;
};

class Backend;

// Owns device memory; gives it back to the backend that handed it out.
class Buffer {
 public:
  enum class Kind : std::uint8_t { kDevice, kPinned, kAdopted };

  Buffer() = default;
  Buffer(Backend& owner, void* data, Allocation what, Kind kind)
      : owner_(&owner), data_(data), what_(what), kind_(kind) {}
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    Buffer(std::move(other)).swap(*this);
    return *this;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer();

  [[nodiscard]] void* data() const { return data_; }
  template <class T>
  [[nodiscard]] T* as() const {
    return static_cast<T*>(data_);
  }
  [[nodiscard]] std::size_t bytes() const { return what_.bytes; }
  [[nodiscard]] const Allocation& what() const { return what_; }
  [[nodiscard]] Kind kind() const { return kind_; }
  // For decorators: `owner` takes over the duty of releasing it.
  void hand_to(Backend& owner) { owner_ = &owner; }
  void swap(Buffer& other) noexcept {
    std::swap(owner_, other.owner_);
    std::swap(data_, other.data_);
    std::swap(what_, other.what_);
    std::swap(kind_, other.kind_);
  }

 private:
  Backend* owner_ = nullptr;
  void* data_ = nullptr;
  Allocation what_{};
  Kind kind_ = Kind::kDevice;
};

enum class First : bool { kNo, kYes };  // kYes stores, never adds to 0 (-0 stays -0)

// Every verb with a stream enqueues there and returns; on kHost it runs before it returns.
// The first error in a stream poisons it: later work is dropped, and whoever waits for an event
// of it (or for an event behind one) gets that error.
class Backend {
 public:
  Backend() = default;
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;
  virtual ~Backend() = default;

  // ---- memory: 256-byte aligned, contents undefined; 0 bytes are legal (data() may be null)
  // Throws: OutOfMemory
  [[nodiscard]] virtual Buffer allocate(const Allocation&) = 0;
  [[nodiscard]] virtual Buffer allocate_host(
      const Allocation&) = 0;  // page-locked; not in the budget
  [[nodiscard]] virtual Buffer adopt(void*, const Allocation&) = 0;  // counted, not freed
  // Requires: no work that touches it is still enqueued
  virtual void release(Buffer&) noexcept = 0;

  // ---- streams and events
  [[nodiscard]] virtual StreamRef make_stream() = 0;
  virtual void release_stream(StreamRef) noexcept = 0;  // finishes what is enqueued first
  [[nodiscard]] virtual Event record(StreamRef) = 0;
  virtual void wait(StreamRef, const Event&) = 0;  // kHost: the same as host_wait
  [[nodiscard]] virtual bool done(const Event&) = 0;
  virtual void host_wait(const Event&) = 0;  // Throws: the error that poisoned the event's stream
  // Runs a host function in stream order. It must not call this backend on the same stream.
  virtual void call(StreamRef, std::function<void()>) = 0;

  // ---- kernels
  virtual void copy(void* to, const void* from, std::size_t bytes, StreamRef) = 0;
  virtual void fill(void* to, int byte, std::size_t bytes, StreamRef) = 0;
  // into (+)= from, added in fp32 and rounded to `into`'s dtype; kYes is a conversion.
  // Requires: fp32 or bf16 on either side; no overlap unless into == from
  virtual void accumulate(void* into, DType into_dtype, const void* from, DType from_dtype,
                          std::size_t count, First, StreamRef) = 0;
  // Adds up in as the binary tree over its indices (split at the largest power of two below n)
  // in fp32 (int64 for kInt64: exact). out may be one of in.
  virtual void sum_tree(void* out, std::span<const void* const> in, DType in_dtype,
                        std::size_t count, StreamRef) = 0;
  // Adds the squares of args.gradients over the measured chunks of counted parameters to
  // args.control's bins (carried), and notes non-finite elements there.
  virtual void measure(const UpdateArguments&, StreamRef) = 0;
  // From the summed control message: divisor, norm, clip factor, skip, used flags, step counts.
  virtual void prepare(const UpdateArguments&, StreamRef) = 0;
  // One pass over args.chunks; nothing when scalars->skip.
  virtual void update(const UpdateRule&, const UpdateArguments&, StreamRef) = 0;
};

inline Buffer::~Buffer() {
  if (owner_ != nullptr) {
    owner_->release(*this);
  }
}

}  // namespace zero
