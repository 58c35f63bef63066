// A Backend around a Backend that counts the bytes read from memory it did not hand out.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "zero/backend.h"

namespace zero::testing {

// For transports that read peers' memory in place: what they read there is what a wire would carry.
class CountingBackend final : public Backend {
 public:
  explicit CountingBackend(Backend& inner) : inner_(inner) {}

  // Bytes read from others since the last call.
  [[nodiscard]] std::uint64_t take_foreign_bytes() { return foreign_bytes_.exchange(0); }

  [[nodiscard]] Buffer allocate(const Allocation& what) override {
    Buffer out = inner_.allocate(what);
    own_.emplace_back(out.as<std::byte>(), out.as<std::byte>() + what.bytes);
    return out;
  }
  [[nodiscard]] Buffer allocate_host(const Allocation& what) override {
    return inner_.allocate_host(what);
  }
  [[nodiscard]] Buffer adopt(void* data, const Allocation& what) override {
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
    count(from, bytes);
    inner_.copy(to, from, bytes, s);
  }
  void fill(void* to, int byte, std::size_t bytes, StreamRef s) override {
    inner_.fill(to, byte, bytes, s);
  }
  void accumulate(void* into, DType into_dtype, const void* from, DType from_dtype, std::size_t n,
                  First first, StreamRef s) override {
    inner_.accumulate(into, into_dtype, from, from_dtype, n, first, s);
  }
  void sum_tree(void* out, std::span<const void* const> in, DType dtype, std::size_t n,
                StreamRef s) override {
    for (const void* one : in) {
      count(one, n * bytes_of(dtype));
    }
    inner_.sum_tree(out, in, dtype, n, s);
  }
  void measure(const UpdateArguments& a, StreamRef s) override { inner_.measure(a, s); }
  void prepare(const UpdateArguments& a, StreamRef s) override { inner_.prepare(a, s); }
  void update(const UpdateRule& r, const UpdateArguments& a, StreamRef s) override {
    inner_.update(r, a, s);
  }

 private:
  void count(const void* from, std::size_t bytes) {
    const auto* at = static_cast<const std::byte*>(from);
    for (const auto& [first, end] : own_) {
      if (!std::less<>()(at, first) && std::less<>()(at, end)) {
        return;
      }
    }
    foreign_bytes_ += bytes;
  }

  Backend& inner_;
  std::vector<std::pair<const std::byte*, const std::byte*>> own_;
  std::atomic<std::uint64_t> foreign_bytes_{0};
};

}  // namespace zero::testing
