// A Backend around a Backend that counts bytes by category and enforces a budget.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>

#include "zero/backend.h"

namespace zero {

struct MemoryUsage {
  std::array<std::uint64_t, kCategoryCount> current{}, peak{};  // by category; each its own peak
  std::uint64_t current_bytes = 0, peak_bytes = 0;              // over all categories
  std::uint64_t host_bytes = 0, host_peak_bytes = 0;            // page-locked, outside the budget
  std::uint64_t allocations = 0;                                // calls so far, of all kinds
  [[nodiscard]] std::uint64_t of(Category c) const { return current[static_cast<std::size_t>(c)]; }
};

class Ledger final : public Backend {
 public:
  Ledger(std::unique_ptr<Backend> inner, std::uint64_t budget_bytes);
  ~Ledger() override;

  [[nodiscard]] MemoryUsage usage() const;
  [[nodiscard]] std::uint64_t budget_bytes() const { return budget_; }

  // Throws: OutOfMemory with the table by category; nothing is counted then
  [[nodiscard]] Buffer allocate(const Allocation&) override;
  [[nodiscard]] Buffer allocate_host(const Allocation&) override;
  [[nodiscard]] Buffer adopt(void*, const Allocation&) override;
  void release(Buffer&) noexcept override;

  [[nodiscard]] StreamRef make_stream() override { return inner_->make_stream(); }
  void release_stream(StreamRef s) noexcept override { inner_->release_stream(s); }
  [[nodiscard]] Event record(StreamRef s) override { return inner_->record(s); }
  void wait(StreamRef s, const Event& e) override { inner_->wait(s, e); }
  [[nodiscard]] bool done(const Event& e) override { return inner_->done(e); }
  void host_wait(const Event& e) override { inner_->host_wait(e); }
  void call(StreamRef s, std::function<void()> f) override { inner_->call(s, std::move(f)); }
  void copy(void* to, const void* from, std::size_t bytes, StreamRef s) override {
    inner_->copy(to, from, bytes, s);
  }
  void fill(void* to, int byte, std::size_t bytes, StreamRef s) override {
    inner_->fill(to, byte, bytes, s);
  }
  void accumulate(void* into, DType into_dtype, const void* from, DType from_dtype,
                  std::size_t count, First first, StreamRef s) override {
    inner_->accumulate(into, into_dtype, from, from_dtype, count, first, s);
  }
  void sum_tree(void* out, std::span<const void* const> in, DType dtype, std::size_t count,
                StreamRef s) override {
    inner_->sum_tree(out, in, dtype, count, s);
  }
  void measure(const UpdateArguments& a, StreamRef s) override { inner_->measure(a, s); }
  void prepare(const UpdateArguments& a, StreamRef s) override { inner_->prepare(a, s); }
  void update(const UpdateRule& r, const UpdateArguments& a, StreamRef s) override {
    inner_->update(r, a, s);
  }

 private:
  void check(const Allocation&) const;  // padding and budget
  void count(const Allocation&, Buffer::Kind);

  std::unique_ptr<Backend> inner_;
  std::uint64_t budget_;
  mutable std::mutex mutex_;
  MemoryUsage usage_;
};

}  // namespace zero
