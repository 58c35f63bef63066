// What every rank holds, sends and needs: a pure value computed before any memory is taken.
#pragma once

#include <array>
#include <cstdint>
#include <iosfwd>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "zero/model.h"
#include "zero/options.h"

namespace zero {

// Elements to which parameters, shards and logical chunks are aligned.
inline constexpr std::uint64_t kGranule = 256;
// Elements of one row of the chunk table, at most.
inline constexpr std::uint64_t kChunkElements = 64 * kGranule;

// Whose bytes. kPadding counts the padding of the first four apart from them.
enum class Category : std::uint8_t {
  kParameters,
  kGradients,
  kMaster,
  kStates,
  kPadding,
  kLiveUnits,
  kBuckets,
  kScratch,  // communication scratch, partial sums, tables
  kUser,
};
inline constexpr std::size_t kCategoryCount = 9;
[[nodiscard]] std::string_view name_of(Category);

// A run of one parameter's elements [first, first + count) that a rank owns, at element `offset`
// of the rank's shard arrays of the parameter's class.
struct Extent {
  ParameterId parameter{};
  std::uint64_t first = 0, count = 0, offset = 0;
  friend bool operator==(const Extent&, const Extent&) = default;
};

// Parameters that share arrays: trained or frozen alike, same dtypes, same rule.
struct ParameterClass {
  Train train = Train::kYes;
  Precision precision{};
  UpdateRule rule;
  std::uint64_t elements = 0;  // padded, over all units; a multiple of W * kGranule
  friend bool operator==(const ParameterClass&, const ParameterClass&) = default;
};

// The part of a unit that belongs to one class: contiguous, padded to W granules, cut alone.
struct Segment {
  UnitId unit{};
  std::uint32_t class_index = 0;
  std::uint64_t elements = 0;           // padded; the shard is elements / W
  std::uint64_t offset = 0;             // in the class's full array; in its shard array: offset / W
  std::uint64_t unit_bytes_at = 0;      // where the segment starts in the unit's live slot, bytes
  std::uint64_t gradient_bytes_at = 0;  // where it starts in the unit's gradient, bytes
  std::uint32_t first = 0, count = 0;   // its parameters: layout()[first .. first + count)
  friend bool operator==(const Segment&, const Segment&) = default;
};

// Where a parameter starts: element `offset` of segments()[segment].
struct Place {
  std::uint32_t segment = 0;
  std::uint64_t offset = 0;
  friend bool operator==(const Place&, const Place&) = default;
};

// Where a unit is gathered at stage 3: bytes [offset, offset + bytes) of the live arena.
struct Slot {
  std::uint64_t offset = 0, bytes = 0;
  friend bool operator==(const Slot&, const Slot&) = default;
};

// One line of the memory table.
struct PlanItem {
  std::string name;  // "parameters", "exp_avg", "activations", ...
  Category category{};
  bool transient = false;  // needed only while a step runs (allocated once, all the same)
  std::uint64_t bytes = 0;
};

class Plan {
 public:
  [[nodiscard]] const ModelSpec& model() const { return model_; }
  [[nodiscard]] const Options& options() const { return options_; }
  [[nodiscard]] const World& world() const { return world_; }

  // ---- layout, the same on all ranks
  [[nodiscard]] std::span<const ParameterClass> classes() const { return classes_; }
  [[nodiscard]] std::span<const Segment> segments() const { return segments_; }
  [[nodiscard]] std::span<const Segment> segments(UnitId) const;
  [[nodiscard]] std::span<const ParameterId> layout() const { return layout_; }
  [[nodiscard]] const Place& place(ParameterId) const;
  // Bytes of the unit when gathered, and of its gradient in the lease's dtype; padding included.
  [[nodiscard]] std::uint64_t unit_bytes(UnitId) const;
  [[nodiscard]] std::uint64_t gradient_bytes(UnitId) const;
  // The slot of a unit at stage 3, its ordinal, and the arena's size (0 below stage 3).
  [[nodiscard]] std::uint32_t slot_of(UnitId) const;
  [[nodiscard]] std::span<const Slot> slots() const { return slots_; }
  // Bytes of one of Options::buckets gradient buffers; 0 when nothing is trained in buckets.
  [[nodiscard]] std::uint64_t bucket_buffer_bytes() const { return bucket_bytes_; }
  // fp32 elements of the buffer into which later micro-batches are reduced; 0 when not needed.
  [[nodiscard]] std::uint64_t reduce_scratch_elements() const { return reduce_scratch_; }
  // kWorldInvariant: fp32 gradient shards beside the gradient itself.
  [[nodiscard]] std::uint32_t partial_sums() const;

  // ---- one rank
  // The only map from (parameter, element) to memory: in order of offset, cut at shard borders,
  // not at chunks. Stage 0: the rank's W-th part (its offset counts as if sharded).
  // Throws: UsageError for a rank or unit out of range
  [[nodiscard]] std::vector<Extent> extents(int rank, UnitId) const;
  // Rows of the chunk table: the rank's own part, and all that it updates (more at stage 0 only).
  struct ChunkCounts {
    std::uint64_t own = 0, updated = 0;
  };
  [[nodiscard]] ChunkCounts chunk_counts(int rank, std::uint32_t class_index) const;
  // The lowest rank with the highest peak; ranks differ in their chunk tables only.
  [[nodiscard]] int fullest_rank() const;

  [[nodiscard]] std::vector<PlanItem> items(int rank) const;
  [[nodiscard]] std::uint64_t bytes(Category, int rank) const;
  [[nodiscard]] std::uint64_t persistent_bytes(int rank) const;
  [[nodiscard]] std::uint64_t peak_bytes(int rank) const;

  // Bytes that one rank sends in a step of `micro_batches`, each unit gathered once in forward and
  // once in backward at stage 3; control messages of a few bytes a parameter included.
  [[nodiscard]] std::uint64_t wire_bytes_per_step(int micro_batches) const;

  // Parameter elements: all, and those that are trained. No padding.
  [[nodiscard]] std::uint64_t parameter_count() const;
  [[nodiscard]] std::uint64_t trained_count() const;
  // (parameters + gradients + master + states) of the design's formula, for one rank: no padding,
  // no buffers; sharded arrays are divided by W exactly (rounded up).
  [[nodiscard]] std::uint64_t formula_bytes(Category) const;

  // Equal on ranks that run the same model, options and world.
  [[nodiscard]] std::uint64_t digest() const;

  // Throws: OutOfMemory whose message holds the table, what is missing, and what would fit
  //         (a higher stage, more ranks) when the peak of the fullest rank exceeds `device_bytes`
  void require_fit(std::uint64_t device_bytes) const;

  friend bool operator==(const Plan&, const Plan&);
  friend std::ostream& operator<<(std::ostream&, const Plan&);
  // Throws: UsageError for options or a world out of range, replicate_ranks != 1, a model without
  //         parameters or units, a rule or dtype that this build does not carry
  friend Plan make_plan(const ModelSpec&, const Options&, World);

 private:
  friend class PlanBuilder;
  Plan() = default;
  ModelSpec model_;
  Options options_;
  World world_;
  std::vector<ParameterClass> classes_;
  std::vector<Segment> segments_;          // unit-major
  std::vector<std::uint32_t> unit_begin_;  // first segment of each unit, and the end
  std::vector<ParameterId> layout_;        // segment-major
  std::vector<Place> places_;              // by parameter
  std::vector<std::uint32_t> slot_of_unit_;
  std::vector<Slot> slots_;
  std::uint64_t bucket_bytes_ = 0;
  std::uint64_t reduce_scratch_ = 0;
};

[[nodiscard]] Plan make_plan(const ModelSpec&, const Options&, World);

// "1.50 GiB"; exact bytes below 1 KiB.
[[nodiscard]] std::string format_bytes(std::uint64_t bytes);

}  // namespace zero
