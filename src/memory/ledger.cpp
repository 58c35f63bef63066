#include "zero/ledger.h"

#include <algorithm>
#include <iomanip>
#include <sstream>
#include <utility>

#include "zero/error.h"

namespace zero {
namespace {

std::uint64_t& of(std::array<std::uint64_t, kCategoryCount>& counts, Category category) {
  return counts.at(static_cast<std::size_t>(category));
}

void add(MemoryUsage& usage, Category category, std::uint64_t bytes) {
  std::uint64_t& current = of(usage.current, category);
  current += bytes;
  of(usage.peak, category) = std::max(of(usage.peak, category), current);
}

void line(std::ostream& out, std::string_view name, std::uint64_t bytes) {
  out << "  " << std::left << std::setw(18) << name << std::right << std::setw(12)
      << format_bytes(bytes) << '\n';
}

std::string refusal(const MemoryUsage& usage, const Allocation& asked, std::uint64_t budget) {
  std::ostringstream out;
  out << "out of device memory: asked for " << format_bytes(asked.bytes) << " ("
      << name_of(asked.category) << ") with " << format_bytes(usage.current_bytes) << " of "
      << format_bytes(budget) << " in use, " << asked.bytes << " + " << usage.current_bytes << " > "
      << budget << " bytes\n";
  for (std::size_t c = 0; c < kCategoryCount; ++c) {
    if (usage.current[c] > 0) {
      line(out, name_of(static_cast<Category>(c)), usage.current[c]);
    }
  }
  line(out, "in use", usage.current_bytes);
  line(out, "left", budget - usage.current_bytes);
  out << "raise the budget, or shard more: a higher Options::stage, more ranks, fewer live_units, "
         "smaller bucket_bytes; Plan::require_fit tells what fits before a run";
  return out.str();
}

}  // namespace

Ledger::Ledger(std::unique_ptr<Backend> inner, std::uint64_t budget_bytes)
    : inner_(std::move(inner)), budget_(budget_bytes) {
  require(inner_ != nullptr, "Ledger around no backend: expected one");
}

Ledger::~Ledger() = default;

MemoryUsage Ledger::usage() const {
  const std::lock_guard lock(mutex_);
  return usage_;
}

// The lock is held while the inner backend allocates: nothing is counted that was not handed out.
Buffer Ledger::allocate(const Allocation& what) {
  const std::lock_guard lock(mutex_);
  check(what);
  Buffer buffer = inner_->allocate(what);
  count(what, Buffer::Kind::kDevice);
  buffer.hand_to(*this);
  return buffer;
}

Buffer Ledger::allocate_host(const Allocation& what) {
  const std::lock_guard lock(mutex_);
  Buffer buffer = inner_->allocate_host(what);
  count(what, Buffer::Kind::kPinned);
  buffer.hand_to(*this);
  return buffer;
}

Buffer Ledger::adopt(void* data, const Allocation& what) {
  const std::lock_guard lock(mutex_);
  check(what);
  Buffer buffer = inner_->adopt(data, what);
  count(what, Buffer::Kind::kAdopted);
  buffer.hand_to(*this);
  return buffer;
}

void Ledger::release(Buffer& buffer) noexcept {
  const Allocation& what = buffer.what();
  inner_->release(buffer);
  const std::lock_guard lock(mutex_);
  if (buffer.kind() == Buffer::Kind::kPinned) {
    usage_.host_bytes -= what.bytes;
    return;
  }
  of(usage_.current, what.category) -= what.bytes - what.padding;
  of(usage_.current, Category::kPadding) -= what.padding;
  usage_.current_bytes -= what.bytes;
}

void Ledger::check(const Allocation& what) const {
  require(what.padding <= what.bytes, "an allocation of " + std::to_string(what.bytes) +
                                          " bytes with " + std::to_string(what.padding) +
                                          " bytes of padding: expected at most all of it");
  if (what.bytes > budget_ - usage_.current_bytes) {
    throw OutOfMemory(refusal(usage_, what, budget_), {what.bytes, usage_.current_bytes, budget_});
  }
}

void Ledger::count(const Allocation& what, Buffer::Kind kind) {
  ++usage_.allocations;
  if (kind == Buffer::Kind::kPinned) {
    usage_.host_bytes += what.bytes;
    usage_.host_peak_bytes = std::max(usage_.host_peak_bytes, usage_.host_bytes);
    return;
  }
  add(usage_, what.category, what.bytes - what.padding);
  add(usage_, Category::kPadding, what.padding);
  usage_.current_bytes += what.bytes;
  usage_.peak_bytes = std::max(usage_.peak_bytes, usage_.current_bytes);
}

}  // namespace zero
