// All device memory of an optimizer: allocated once, in the plan's order, to the plan's byte.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/context.h"

namespace zero {

class Arrays {
 public:
  explicit Arrays(Context& context);

  // ---- one segment. "own" is this rank's shard; "full" needs an array that is not sharded.
  [[nodiscard]] std::byte* own_parameters(const Segment& s) const;
  [[nodiscard]] std::byte* full_parameters(const Segment& s) const;
  [[nodiscard]] float* own_gradients(const Segment& s) const;
  [[nodiscard]] float* full_gradients(const Segment& s) const;
  [[nodiscard]] float* own_master(const Segment& s) const;  // null: there is none
  [[nodiscard]] float* full_master(const Segment& s) const;
  [[nodiscard]] float* own_state(const Segment& s, std::size_t state) const;
  // kWorldInvariant: the partial sum of 2^level micro-batches; the top level is the gradient.
  [[nodiscard]] float* partial(const Segment& s, std::uint32_t level) const;

  [[nodiscard]] std::byte* live(UnitId unit) const;  // the unit's slot, stage 3
  [[nodiscard]] std::byte* bucket(std::size_t i) const;
  // A kUntilReady unit's buffer for one of the open micro-batches.
  [[nodiscard]] std::byte* until_ready(UnitId unit, std::size_t open) const;
  [[nodiscard]] float* reduce_scratch() const { return reduce_scratch_.as<float>(); }

  // ---- the step's tables
  [[nodiscard]] std::size_t class_count() const { return classes_.size(); }
  // What measure, prepare and update read for one class; prepare needs no particular one.
  [[nodiscard]] const UpdateArguments& arguments(std::size_t c) const {
    return classes_[c].arguments;
  }
  [[nodiscard]] std::size_t control_words() const {
    return control_.bytes() / sizeof(std::int64_t);
  }
  [[nodiscard]] ParameterRow* rows() const { return rows_.as<ParameterRow>(); }
  [[nodiscard]] Hyper* groups() const { return groups_.as<Hyper>(); }
  [[nodiscard]] StepInputs* inputs() const { return inputs_.as<StepInputs>(); }
  [[nodiscard]] StepScalars* scalars() const { return scalars_.as<StepScalars>(); }
  [[nodiscard]] std::int64_t* control() const { return control_.as<std::int64_t>(); }

  // States to zero, step counts to zero.
  void reset_states();

 private:
  struct ClassArrays {
    Buffer parameters, gradients, master, chunks;
    std::vector<Buffer> states;
    UpdateArguments arguments;
  };
  [[nodiscard]] std::uint64_t own_at(const Segment& s, bool sharded) const;
  void allocate_class(std::size_t c);
  void allocate_buffers();
  void allocate_tables();
  void fill_chunks(std::size_t c);
  void write_rows();

  Context& context_;
  std::vector<ClassArrays> classes_;
  std::vector<std::uint64_t> real_own_, real_all_;  // elements without padding, by class
  Buffer live_, reduce_scratch_, partial_sums_;
  std::vector<std::uint64_t> partial_at_;  // by class, in floats of one level
  std::uint64_t partial_level_ = 0;        // floats of one level
  std::vector<Buffer> buckets_, until_ready_;
  std::vector<std::size_t> until_ready_at_;  // by unit
  Buffer rows_, groups_, inputs_, scalars_, control_;
};

}  // namespace zero
