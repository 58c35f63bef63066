#include "engine/context.h"

#include "zero/error.h"

namespace zero {
namespace {

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "an exception that is no std::exception";
  }
}

}  // namespace

void StreamPoints::finish(Backend& device) const noexcept {
  for (const auto& point : points_) {
    try {
      if (point.second.impl != nullptr) {
        device.host_wait(point.second);
      }
    } catch (...) {  // the stream's own user learns of it
    }
  }
}

Context::Context(const Plan& plan_in, Backend& device_in, Communicator& ranks_in)
    : plan(plan_in),
      device(device_in),
      ranks(ranks_in),
      rank(ranks_in.rank()),
      world(ranks_in.world()),
      stream(device_in.make_stream()) {
  const int number = ranks_in.count_user();
  if (number > 0) prefix_ = "optimizer " + std::to_string(number + 1) + ": ";
}

Context::~Context() {
  device.release_stream(stream);
}

On Context::on(std::string_view label, std::span<const Event> after) {
  if (!prefix_.empty()) {
    label_.assign(prefix_).append(label);
    label = label_;
  }
  return {device, stream, after, label, plan.options().deadline};
}

std::uint64_t Context::sent(std::uint64_t bytes) const {
  const auto w = static_cast<std::uint64_t>(world);
  return bytes / w * (w - 1);
}

Event Context::reduce_scatter(std::span<const Transfer> transfers, std::string_view label,
                              std::span<const Event> after) {
  ++statistics.reductions;
  for (const Transfer& t : transfers) {
    statistics.wire_bytes += sent(t.count * static_cast<std::uint64_t>(world) * bytes_of(t.dtype));
  }
  latest_ = ranks.reduce_scatter(transfers, SumOrder::kTree, on(label, after));
  return latest_;
}

Event Context::all_gather(std::span<const Transfer> transfers, std::string_view label,
                          std::span<const Event> after) {
  for (const Transfer& t : transfers) {
    statistics.wire_bytes += sent(t.count * static_cast<std::uint64_t>(world) * bytes_of(t.dtype));
  }
  latest_ = ranks.all_gather(transfers, on(label, after));
  return latest_;
}

Event Context::all_reduce(std::span<const Transfer> transfers, std::string_view label) {
  for (const Transfer& t : transfers) {
    statistics.wire_bytes += 2 * t.count * bytes_of(t.dtype) *
                             static_cast<std::uint64_t>(world - 1) /
                             static_cast<std::uint64_t>(world);
  }
  latest_ = ranks.all_reduce(transfers, on(label, {}));
  return latest_;
}

void Context::finish(const Event& event) {
  try {
    device.host_wait(event);
  } catch (...) {
    poison(std::current_exception());
    throw;
  }
}

void Context::check() {
  if (poison_ != nullptr) {
    std::rethrow_exception(poison_);
  }
  try {
    if (latest_.impl != nullptr && device.done(latest_)) {
      device.host_wait(latest_);  // does not block; throws what poisoned the stream
      latest_ = {};
    }
    ranks.bootstrap().check();
  } catch (...) {
    poison(std::current_exception());
    throw;
  }
}

void Context::poison(std::exception_ptr error) noexcept {
  if (poison_ != nullptr) {
    return;
  }
  poison_ = error;
  try {
    ranks.bootstrap().raise(text_of(error));
  } catch (...) {  // out of memory while copying a message: the others run into their deadline
    ranks.bootstrap().raise("");
  }
}

}  // namespace zero
