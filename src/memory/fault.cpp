#include "memory/fault.h"

#include <string>
#include <thread>
#include <utility>

#include "zero/error.h"

namespace zero {

ForwardingBackend::ForwardingBackend(std::unique_ptr<Backend> inner) : inner_(std::move(inner)) {
  require(inner_ != nullptr, "a backend around no backend: expected one");
}

Buffer ForwardingBackend::own(Buffer buffer) {
  buffer.hand_to(*this);
  return buffer;
}

Buffer ForwardingBackend::allocate(const Allocation& what) {
  before_allocation();
  return own(inner_->allocate(what));
}
Buffer ForwardingBackend::allocate_host(const Allocation& what) {
  before_allocation();
  return own(inner_->allocate_host(what));
}
Buffer ForwardingBackend::adopt(void* data, const Allocation& what) {
  before_allocation();
  return own(inner_->adopt(data, what));
}
void ForwardingBackend::release(Buffer& buffer) noexcept {
  inner_->release(buffer);
}

StreamRef ForwardingBackend::make_stream() {
  return inner_->make_stream();
}
void ForwardingBackend::release_stream(StreamRef stream) noexcept {
  inner_->release_stream(stream);
}
Event ForwardingBackend::record(StreamRef stream) {
  return inner_->record(stream);
}
void ForwardingBackend::wait(StreamRef stream, const Event& event) {
  inner_->wait(stream, event);
}
bool ForwardingBackend::done(const Event& event) {
  return inner_->done(event);
}
void ForwardingBackend::host_wait(const Event& event) {
  inner_->host_wait(event);
}

void ForwardingBackend::call(StreamRef stream, std::function<void()> f) {
  before_task(stream);
  inner_->call(stream, std::move(f));
}
void ForwardingBackend::copy(void* to, const void* from, std::size_t bytes, StreamRef stream) {
  before_task(stream);
  inner_->copy(to, from, bytes, stream);
}
void ForwardingBackend::fill(void* to, int byte, std::size_t bytes, StreamRef stream) {
  before_task(stream);
  inner_->fill(to, byte, bytes, stream);
}
void ForwardingBackend::accumulate(void* into, DType into_dtype, const void* from, DType from_dtype,
                                   std::size_t count, First first, StreamRef stream) {
  before_task(stream);
  inner_->accumulate(into, into_dtype, from, from_dtype, count, first, stream);
}
void ForwardingBackend::sum_tree(void* out, std::span<const void* const> in, DType dtype,
                                 std::size_t count, StreamRef stream) {
  before_task(stream);
  inner_->sum_tree(out, in, dtype, count, stream);
}
void ForwardingBackend::measure(const UpdateArguments& arguments, StreamRef stream) {
  before_task(stream);
  inner_->measure(arguments, stream);
}
void ForwardingBackend::prepare(const UpdateArguments& arguments, StreamRef stream) {
  before_task(stream);
  inner_->prepare(arguments, stream);
}
void ForwardingBackend::update(const UpdateRule& rule, const UpdateArguments& arguments,
                               StreamRef stream) {
  before_task(stream);
  inner_->update(rule, arguments, stream);
}

FaultBackend::FaultBackend(std::unique_ptr<Backend> inner, Faults faults)
    : ForwardingBackend(std::move(inner)), faults_(faults) {}

void FaultBackend::before_allocation() {
  const std::uint64_t number = allocations_++;
  if (number == faults_.allocation) {
    throw OutOfMemory("injected: allocation " + std::to_string(number) + " fails", {});
  }
}

void FaultBackend::before_task(StreamRef stream) {
  const std::uint64_t number = tasks_++;
  if (number == faults_.task) {
    inner().call(stream,
                 [number] { throw Error("injected: task " + std::to_string(number) + " fails"); });
  }
}

DropWait::DropWait(std::unique_ptr<Backend> inner, std::uint64_t dropped)
    : ForwardingBackend(std::move(inner)), dropped_(dropped) {}

void DropWait::wait(StreamRef stream, const Event& event) {
  if (event.impl != nullptr && waits_++ == dropped_) {
    return;
  }
  ForwardingBackend::wait(stream, event);
}

SlowBackend::SlowBackend(std::unique_ptr<Backend> inner, std::uint64_t seed,
                         std::chrono::microseconds most)
    : ForwardingBackend(std::move(inner)), seed_(seed), most_(most) {}

void SlowBackend::before_task(StreamRef stream) {
  std::uint64_t random = (seed_ + ++tasks_) * 0x9e3779b97f4a7c15ULL;
  random = (random ^ (random >> 29)) * 0xbf58476d1ce4e5b9ULL;
  random ^= random >> 32;
  if (stream.kind == StreamRef::Kind::kHost || random % 2 == 0) {
    return;
  }
  const auto delay = most_ * static_cast<std::int64_t>(random / 2 % 1024) / 1024;
  inner().call(stream, [delay] { std::this_thread::sleep_for(delay); });
}

}  // namespace zero
