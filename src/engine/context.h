// What all parts of the engine share: the plan, the device, the ranks and the one engine stream.
#pragma once

#include <exception>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "zero/backend.h"
#include "zero/communicator.h"
#include "zero/optimizer.h"
#include "zero/plan.h"

namespace zero {

// The latest point of each stream that touched something: a later event of a stream covers its
// earlier ones, so the list is as long as there are streams, however many leases there were.
class StreamPoints {
 public:
  void add(StreamRef stream, Event event) {
    for (auto& [known, latest] : points_) {
      if (known == stream) {
        latest = std::move(event);
        return;
      }
    }
    points_.emplace_back(stream, std::move(event));
  }
  // Makes `stream` wait for all points but its own.
  void order_before(StreamRef stream, Backend& device) const {
    for (const auto& [other, event] : points_) {
      if (!(other == stream)) {
        device.wait(stream, event);
      }
    }
  }
  void append_to(std::vector<Event>& events) const {
    for (const auto& point : points_) {
      if (point.second.impl != nullptr) {
        events.push_back(point.second);
      }
    }
  }
  // Blocks until all points are reached; a poisoned stream has nothing left to wait for.
  void finish(Backend& device) const noexcept;
  [[nodiscard]] bool empty() const { return points_.empty(); }
  void clear() { points_.clear(); }

 private:
  std::vector<std::pair<StreamRef, Event>> points_;
};

class Context {
 public:
  Context(const Plan& plan_in, Backend& device_in, Communicator& ranks_in);
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  ~Context();  // finishes the engine stream

  [[nodiscard]] const ModelSpec& model() const { return plan.model(); }
  [[nodiscard]] Stage stage() const { return plan.options().stage; }
  [[nodiscard]] bool parameters_sharded() const { return stage() == Stage::kParameters; }
  [[nodiscard]] bool gradients_sharded() const { return stage() >= Stage::kGradients; }
  [[nodiscard]] bool states_sharded() const { return stage() >= Stage::kStates; }
  [[nodiscard]] bool trained(const Segment& s) const {
    return plan.classes()[s.class_index].train == Train::kYes;
  }
  [[nodiscard]] std::uint64_t shard_elements(const Segment& s) const {
    return s.elements / static_cast<std::uint64_t>(world);
  }
  [[nodiscard]] const std::string& name(UnitId u) const { return model().units()[index(u)].name; }
  [[nodiscard]] const std::string& name(ParameterId p) const {
    return model().parameters()[index(p)].name;
  }
  // "rank 2: "
  [[nodiscard]] std::string who() const { return "rank " + std::to_string(rank) + ": "; }

  // ---- collectives on the engine stream; they count the bytes that this rank sends
  Event reduce_scatter(std::span<const Transfer>, std::string_view label,
                       std::span<const Event> after = {});
  Event all_gather(std::span<const Transfer>, std::string_view label,
                   std::span<const Event> after = {});
  Event all_reduce(std::span<const Transfer>, std::string_view label);
  // Blocks until the engine stream is idle. Throws: what poisoned it, which all ranks learn
  void finish() { finish(device.record(stream)); }
  void finish(const Event& event);

  // ---- errors: the first one stays, and every rank learns of it
  void check();
  void poison(std::exception_ptr error) noexcept;
  [[nodiscard]] bool poisoned() const { return poison_ != nullptr; }
  // Runs one public, collective call.
  template <class F>
  auto guarded(F&& call) {
    check();
    try {
      return call();
    } catch (...) {
      poison(std::current_exception());
      throw;
    }
  }

  const Plan plan;
  Backend& device;
  Communicator& ranks;
  const int rank, world;
  const StreamRef stream;
  Statistics statistics;

 private:
  [[nodiscard]] On on(std::string_view label, std::span<const Event> after);
  [[nodiscard]] std::uint64_t sent(std::uint64_t bytes) const;

  // What labels begin with, and the latest one: several optimizers may share a communicator.
  std::string prefix_, label_;
  Event latest_;  // of the engine stream: polled, so that an error in it cannot go unnoticed
  std::exception_ptr poison_;
};

}  // namespace zero
