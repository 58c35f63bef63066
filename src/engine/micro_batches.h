// Gradient leases: where each unit's gradient of each open micro-batch lives, what was written,
// and when a bucket of whole units goes to the reducer.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "engine/arrays.h"
#include "engine/context.h"
#include "engine/reducer.h"

namespace zero {

class MicroBatches {
 public:
  MicroBatches(Context& context, Arrays& arrays, Reducer& reducer);
  MicroBatches(const MicroBatches&) = delete;
  MicroBatches& operator=(const MicroBatches&) = delete;
  ~MicroBatches();  // waits for those who write gradients under leases that have ended

  // Returns: an id that is never used again
  std::uint64_t begin(bool last);
  [[nodiscard]] bool is_open(std::uint64_t id) const;
  [[nodiscard]] int open_count() const;
  [[nodiscard]] int begun() const { return begun_; }

  void open_lease(std::uint64_t id, UnitId unit, StreamRef stream);
  void close_lease(std::uint64_t id, UnitId unit, StreamRef stream);
  [[nodiscard]] void* data(std::uint64_t id, ParameterId parameter, DType dtype, Write write,
                           UnitId unit, StreamRef stream);
  void add(std::uint64_t id, ParameterId parameter, const void* from, DType dtype,
           StreamRef stream);
  void mark_unused(std::uint64_t id, ParameterId parameter);
  // Returns: whether the micro-batch is complete with it
  [[nodiscard]] bool ready(std::uint64_t id, UnitId unit, StreamRef stream);

  // Throws: UsageError naming the first unit that is missing, or when nothing was begun
  void require_complete() const;
  // The first unit of an open micro-batch that is not ready. Requires: is_open(id)
  [[nodiscard]] UnitId missing_unit(std::uint64_t id) const;
  // Throws: UsageError naming the unit of an open gradient lease
  void require_no_lease() const;
  // Whether any micro-batch since the last reset wrote the parameter's gradient.
  [[nodiscard]] const std::vector<std::uint8_t>& used() const { return used_; }

  // Forgets everything since the last step; the engine stream waits for whoever still writes.
  void abandon();
  void reset();

 private:
  enum class Progress : std::uint8_t { kNone, kPlaced, kReady };
  enum class Written : std::uint8_t { kNo, kYes, kUnused };
  struct UnitGradient {
    Progress progress = Progress::kNone;
    std::size_t bucket = 0;
    std::byte* data = nullptr;
    int leases = 0;
    StreamRef leased_on{};   // while leases > 0
    std::uint32_t turn = 0;  // how many contributions to the unit became ready before this one
    StreamPoints writers;
  };
  struct Micro {
    std::uint64_t id = 0;  // 0: not in use
    std::uint32_t ordinal = 0;
    std::size_t slot = 0;
    std::size_t ready = 0;
    std::size_t bucket = kNoBucket;  // where the next unit goes if it fits
    std::vector<UnitGradient> units;
    std::vector<Written> written;  // by parameter
  };
  struct Bucket {
    std::byte* memory = nullptr;
    std::uint64_t capacity = 0, used = 0;
    std::size_t micro = 0;
    std::vector<UnitId> units;  // empty: free
    bool closed = false;
    std::uint64_t launched = 0;  // when, by count of launches
    Event free;                  // from here on the memory may be written
  };
  static constexpr std::size_t kNoBucket = static_cast<std::size_t>(-1);

  void add_bucket(std::byte* memory, std::uint64_t capacity);
  [[nodiscard]] bool finished(const Micro& m) const;
  [[nodiscard]] Micro& find(std::uint64_t id);
  [[nodiscard]] const Micro& find(std::uint64_t id) const;
  [[nodiscard]] const ModelSpec::Parameter& trained_parameter(ParameterId parameter) const;
  [[nodiscard]] DType gradient_dtype(ParameterId parameter) const;
  [[nodiscard]] std::byte* address(const Micro& m, ParameterId parameter) const;
  [[nodiscard]] UnitGradient& unit_to_write(Micro& m, UnitId unit, StreamRef stream,
                                            const char* verb);
  [[nodiscard]] UnitGradient& unready_unit(Micro& m, UnitId unit, const char* verb);
  void place(Micro& m, UnitId unit);
  [[nodiscard]] std::size_t room(Micro& m, UnitId unit, std::uint64_t bytes);
  [[nodiscard]] std::size_t free_bucket(UnitId unit);
  void order_writer(const UnitGradient& g, StreamRef stream);
  void finish_parameters(Micro& m, UnitId unit, StreamRef stream);
  [[nodiscard]] bool all_ready(const Bucket& b) const;
  void close(std::size_t bucket);
  void launch_closed();
  void throw_crosswise(const Bucket& b) const;
  void launch(Bucket& b);
  void release_micro(Micro& m);

  Context& context_;
  Arrays& arrays_;
  Reducer& reducer_;
  std::vector<Micro> micros_;    // max_open_micro_batches of them
  std::vector<Bucket> buckets_;  // the shared ones first
  std::size_t shared_buckets_ = 0;
  std::vector<std::size_t> until_ready_;   // by unit: its first own bucket, or kNoBucket
  std::vector<std::uint8_t> needs_ready_;  // by unit: it has elements to train
  std::size_t units_to_ready_ = 0;
  std::vector<std::vector<ParameterId>> parameters_;  // by unit
  std::vector<std::uint8_t> used_;                    // by parameter
  std::vector<std::uint32_t> readied_;                // by unit, since the last step
  std::deque<std::size_t> closed_;                    // buckets to launch, in order of closing
  std::uint64_t next_id_ = 1, launches_ = 0;
  int begun_ = 0;
  bool last_begun_ = false;
  std::vector<Reducer::Contribution> contributions_;
  std::vector<Event> after_;
};

}  // namespace zero
