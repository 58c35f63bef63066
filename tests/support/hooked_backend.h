// A Backend around a Backend with hooks in front of the step kernels, and NaN in fresh memory.
#pragma once

#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include "zero/backend.h"

namespace zero::testing {

class HookedBackend final : public Backend {
 public:
  using Hook = std::function<void(const UpdateArguments&)>;

  explicit HookedBackend(Backend& inner) : inner_(inner) {}

  // Run in stream order, in front of the kernel.
  Hook before_measure, before_prepare, before_update;

  // Bytes of the allocation that starts at `data`, 0 when there is none.
  [[nodiscard]] std::size_t bytes_at(const void* data) const {
    const auto found = sizes_.find(data);
    return found == sizes_.end() ? 0 : found->second;
  }

  [[nodiscard]] Buffer allocate(const Allocation& what) override {
    Buffer out = inner_.allocate(what);
    if (what.bytes > 0) {
      std::memset(out.data(), 0xff, what.bytes);
      sizes_[out.data()] = what.bytes;
    }
    return out;
  }
  [[nodiscard]] Buffer allocate_host(const Allocation& what) override {
    return inner_.allocate_host(what);
  }
  [[nodiscard]] Buffer adopt(void* data, const Allocation& what) override {
    sizes_[data] = what.bytes;
    return inner_.adopt(data, what);
  }
  void release(Buffer& buffer) noexcept override { inner_.release(buffer); }

  [[nodiscard]] StreamRef make_stream() override { return inner_.make_stream(); }
  void release_stream(StreamRef s) noexcept override { inner_.release_stream(s); }
  [[nodiscard]] Event record(StreamRef s) override { return inner_.record(s); }
  void wait(StreamRef s, const Event& e) override { inner_.wait(s, e); }
  [[nodiscard]] bool done(const Event& e) override { return inner_.done(e); }
  void host_wait(const Event& e) override { inner_.host_wait(e); }
  void call(StreamRef s, std::function<void()> f) override { inner_.call(s, std::move(f)); }
  void copy(void* to, const void* from, std::size_t bytes, StreamRef s) override {
    inner_.copy(to, from, bytes, s);
  }
  void fill(void* to, int byte, std::size_t bytes, StreamRef s) override {
    inner_.fill(to, byte, bytes, s);
  }
  void accumulate(void* into, DType into_dtype, const void* from, DType from_dtype,
                  std::size_t count, First first, StreamRef s) override {
    inner_.accumulate(into, into_dtype, from, from_dtype, count, first, s);
  }
  void sum_tree(void* out, std::span<const void* const> in, DType dtype, std::size_t count,
                StreamRef s) override {
    inner_.sum_tree(out, in, dtype, count, s);
  }
  void measure(const UpdateArguments& a, StreamRef s) override {
    run(before_measure, a, s);
    inner_.measure(a, s);
  }
  void prepare(const UpdateArguments& a, StreamRef s) override {
    run(before_prepare, a, s);
    inner_.prepare(a, s);
  }
  void update(const UpdateRule& r, const UpdateArguments& a, StreamRef s) override {
    run(before_update, a, s);
    inner_.update(r, a, s);
  }

 private:
  void run(const Hook& hook, const UpdateArguments& a, StreamRef s) {
    if (hook) {
      inner_.call(s, [hook, a] { hook(a); });
    }
  }

  Backend& inner_;
  std::map<const void*, std::size_t> sizes_;
};

// Writes NaN over every cell of gradients, master and states that no chunk covers: padding, and
// what other ranks own. Returns: how many cells that were
inline std::size_t poison_uncovered(const HookedBackend& device, const UpdateArguments& a) {
  std::size_t poisoned = 0;
  const auto poison = [&](const float* array, std::uint64_t Chunk::*at) {
    if (array == nullptr) {
      return;
    }
    std::vector<bool> covered(device.bytes_at(array) / sizeof(float));
    for (std::size_t c = 0; c < a.chunk_count; ++c) {
      for (std::uint64_t i = 0; i < a.chunks[c].count; ++i) {
        covered.at(a.chunks[c].*at + i) = true;
      }
    }
    for (std::size_t i = 0; i < covered.size(); ++i) {
      if (!covered[i]) {
        const_cast<float*>(array)[i] = std::numeric_limits<float>::quiet_NaN();
        ++poisoned;
      }
    }
  };
  poison(a.gradients, &Chunk::gradient_at);
  poison(a.master, &Chunk::state_at);
  for (void* state : a.states) {
    poison(static_cast<const float*>(state), &Chunk::state_at);
  }
  return poisoned;
}

}  // namespace zero::testing
