// Describes a model: units, parameters and groups. No memory, no ranks; ids, never references.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "zero/dtype.h"
#include "zero/update_rule.h"

namespace zero {

enum class ParameterId : std::uint32_t {};
enum class UnitId : std::uint32_t {};
enum class GroupId : std::uint32_t {};

[[nodiscard]] constexpr std::size_t index(ParameterId id) {
  return static_cast<std::size_t>(id);
}
[[nodiscard]] constexpr std::size_t index(UnitId id) {
  return static_cast<std::size_t>(id);
}
[[nodiscard]] constexpr std::size_t index(GroupId id) {
  return static_cast<std::size_t>(id);
}

// What is kept beside a parameter of low precision.
enum class Master : std::uint8_t { kNone, kFloat32 };

// `gradient` is what the user writes and what the wire carries for a single micro-batch;
// gradients are always accumulated in fp32.
struct Precision {
  DType parameter = DType::kFloat32;
  DType gradient = DType::kFloat32;
  Master master = Master::kNone;
  friend bool operator==(const Precision&, const Precision&) = default;
};
inline constexpr Precision kFloat32Only{};
inline constexpr Precision kBf16WithMaster{DType::kBfloat16, DType::kBfloat16, Master::kFloat32};

enum class Train : std::uint8_t { kYes, kFrozen };
enum class CountInNorm : std::uint8_t { kYes, kNo };  // kNo on all but one tensor-parallel replica

// Where a unit's gradient lives until it is reduced.
enum class GradientLife : std::uint8_t {
  kBucket,      // in one of Options::buckets shared buffers
  kUntilReady,  // in a buffer of its own, one per open micro-batch (tied weights)
};

struct GroupOptions {
  Hyper hyper{};
  UpdateRule rule = adamw();
  Precision precision{};
  Train train = Train::kYes;
};

class ModelSpec {
 public:
  struct Group {
    std::string name;
    GroupOptions options;
  };
  struct Unit {
    std::string name;
    GradientLife life = GradientLife::kBucket;
  };
  struct Parameter {
    std::string name;
    std::vector<std::size_t> shape;  // empty: a scalar, one element
    std::size_t count = 1;           // elements; 0 when a dimension is 0
    UnitId unit{};
    GroupId group{};
    CountInNorm norm = CountInNorm::kYes;
  };
  struct UserBytes {
    std::string name;
    std::uint64_t bytes = 0;
    friend bool operator==(const UserBytes&, const UserBytes&) = default;
  };

  // Parameters with the same update rule, precision and hyper-parameters.
  // Throws: UsageError for a name that is taken or a precision that cannot be (bf16 trained
  //         without a master, fp16, master beside fp32)
  GroupId add_group(std::string name, GroupOptions options = {});

  // The parameters that are gathered and freed together; leased in any order.
  // Throws: UsageError for a name that is taken
  UnitId add_unit(std::string name, GradientLife life = GradientLife::kBucket);

  // Throws: UsageError for an unknown unit or group, a name that is taken within the unit, or a
  //         count over 2^62
  ParameterId add(UnitId unit, std::string name, std::vector<std::size_t> shape, GroupId group,
                  CountInNorm norm = CountInNorm::kYes);

  // Memory of the user's own (activations): planned, budgeted and printed with the rest.
  void add_user_bytes(std::string name, std::uint64_t bytes);

  [[nodiscard]] const std::vector<Group>& groups() const { return groups_; }
  [[nodiscard]] const std::vector<Unit>& units() const { return units_; }
  [[nodiscard]] const std::vector<Parameter>& parameters() const { return parameters_; }
  [[nodiscard]] const std::vector<UserBytes>& user_bytes() const { return user_bytes_; }

 private:
  // Of all kinds, to refuse duplicates. A copy starts without them and finds them again when
  // something is added to it: a plan copies its model, adds nothing, and would spend most of its
  // time here.
  struct Names {
    Names() = default;
    Names(const Names&) {}
    Names(Names&&) noexcept = default;
    Names& operator=(const Names&) {
      taken.clear();
      return *this;
    }
    Names& operator=(Names&&) noexcept = default;
    ~Names() = default;
    std::unordered_set<std::string> taken;
  };
  // Whether a name ("g/NAME", "u/NAME" or "p/UNIT/NAME") was free; it is taken then.
  [[nodiscard]] bool take(std::string name);

  std::vector<Group> groups_;
  std::vector<Unit> units_;
  std::vector<Parameter> parameters_;
  std::vector<UserBytes> user_bytes_;
  Names names_;
};

}  // namespace zero
