#include "zero/model.h"

#include <limits>
#include <utility>

#include "zero/error.h"

#include "core/plan_check.h"

namespace zero {
namespace {

constexpr std::uint64_t kMaxCount = std::uint64_t{1} << 62;

std::string quoted(std::string_view name) {
  return "\"" + std::string(name) + "\"";
}

void require_room(std::size_t ids, std::string_view what) {
  require(ids < std::numeric_limits<std::uint32_t>::max(),
          "expected fewer than 2^32 " + std::string(what) + "s; merge some");
}

bool is_carried(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kBfloat16;
}

void check_precision(const std::string& group, const Precision& precision, Train train) {
  const std::string start = "group " + quoted(group) + ": ";
  for (const auto& [dtype, what] :
       {std::pair{precision.parameter, "parameters"}, std::pair{precision.gradient, "gradients"}}) {
    require(is_carried(dtype), start + "expected " + what + " in fp32 or bf16, found " +
                                   std::string(name_of(dtype)) +
                                   "; choose kFloat32Only or kBf16WithMaster");
  }
  const bool master = precision.master == Master::kFloat32;
  require(!master || precision.parameter != DType::kFloat32,
          start +
              "expected no master beside fp32 parameters (they are the master), found "
              "Master::kFloat32; use kFloat32Only");
  require(master || precision.parameter == DType::kFloat32 || train == Train::kFrozen,
          start + "expected an fp32 master beside trained " +
              std::string(name_of(precision.parameter)) +
              " parameters (small updates would round away), found Master::kNone; use "
              "kBf16WithMaster, or Train::kFrozen");
}

std::string name_in(UnitId unit, std::string_view parameter) {
  return "p/" + std::to_string(index(unit)) + "/" + std::string(parameter);
}

// Elements of a shape; 0 when any dimension is 0, whatever the others are.
std::size_t count_elements(const std::string& name, const std::vector<std::size_t>& shape) {
  std::uint64_t count = 1;
  bool fits = true;
  for (const std::size_t dimension : shape) {
    if (dimension == 0) {
      return 0;
    }
    fits = fits && !__builtin_mul_overflow(count, dimension, &count) && count <= kMaxCount;
  }
  require(fits, "parameter " + quoted(name) +
                    ": expected at most 2^62 elements, found more; check the shape's dimensions");
  return count;
}

}  // namespace

bool ModelSpec::take(std::string name) {
  if (names_.taken.size() != groups_.size() + units_.size() + parameters_.size()) {
    names_.taken.clear();
    for (const Group& group : groups_) {
      names_.taken.insert("g/" + group.name);
    }
    for (const Unit& unit : units_) {
      names_.taken.insert("u/" + unit.name);
    }
    for (const Parameter& parameter : parameters_) {
      names_.taken.insert(name_in(parameter.unit, parameter.name));
    }
  }
  return names_.taken.insert(std::move(name)).second;
}

GroupId ModelSpec::add_group(std::string name, GroupOptions options) {
  require(!name.empty(), "expected a name for the group, found \"\"; name it");
  require_room(groups_.size(), "group");
  check_precision(name, options.precision, options.train);
  check_hyper("group " + quoted(name), options.hyper);
  require(take("g/" + name),
          "group " + quoted(name) + " was added before; expected a new name, or reuse its GroupId");
  groups_.push_back({std::move(name), std::move(options)});
  return static_cast<GroupId>(groups_.size() - 1);
}

UnitId ModelSpec::add_unit(std::string name, GradientLife life) {
  require(!name.empty(), "expected a name for the unit, found \"\"; name it");
  require_room(units_.size(), "unit");
  require(take("u/" + name),
          "unit " + quoted(name) + " was added before; expected a new name, or reuse its UnitId");
  units_.push_back({std::move(name), life});
  return static_cast<UnitId>(units_.size() - 1);
}

ParameterId ModelSpec::add(UnitId unit, std::string name, std::vector<std::size_t> shape,
                           GroupId group, CountInNorm norm) {
  require(!name.empty(), "expected a name for the parameter, found \"\"; name it");
  require(index(unit) < units_.size(),
          "parameter " + quoted(name) + ": expected a unit of this model (0 to " +
              std::to_string(units_.size()) + " exclusive), found " + std::to_string(index(unit)) +
              "; pass what add_unit returned");
  require(index(group) < groups_.size(),
          "parameter " + quoted(name) + ": expected a group of this model (0 to " +
              std::to_string(groups_.size()) + " exclusive), found " +
              std::to_string(index(group)) + "; pass what add_group returned");
  require_room(parameters_.size(), "parameter");
  const std::size_t count = count_elements(name, shape);
  require(take(name_in(unit, name)),
          "parameter " + quoted(name) + " was added to unit " + quoted(units_[index(unit)].name) +
              " before; expected a new name (a tied weight is added once, and its unit leased "
              "twice)");
  parameters_.push_back({std::move(name), std::move(shape), count, unit, group, norm});
  return static_cast<ParameterId>(parameters_.size() - 1);
}

void ModelSpec::add_user_bytes(std::string name, std::uint64_t bytes) {
  user_bytes_.push_back({std::move(name), bytes});
}

}  // namespace zero
