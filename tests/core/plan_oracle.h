// The layout and the bytes of a plan, said again as plainly as possible: loops over parameters,
// no search, no shared tables. For tests only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "zero/plan.h"
#include "zero/update_arguments.h"

namespace zero::testing {

// ceil(value / unit) * unit
[[nodiscard]] inline std::uint64_t padded(std::uint64_t value, std::uint64_t unit) {
  return (value + unit - 1) / unit * unit;
}

struct OracleParameter {
  std::uint32_t id = 0;
  std::uint64_t offset = 0, count = 0;  // within the segment
};

struct OracleSegment {
  std::string kind;  // which class
  bool trained = true, master = false;
  std::uint64_t parameter_size = 0, gradient_size = 0;
  std::vector<std::string> states;
  std::vector<OracleParameter> parameters;
  std::uint64_t elements = 0;                                // padded
  std::uint64_t in_class = 0, unit_at = 0, gradient_at = 0;  // where it starts
};

struct OracleUnit {
  bool until_ready = false;
  std::vector<OracleSegment> segments;
  std::uint64_t bytes = 0, gradient_bytes = 0;
};

[[nodiscard]] inline OracleSegment oracle_segment(const GroupOptions& group) {
  OracleSegment s;
  s.trained = group.train == Train::kYes;
  s.parameter_size = group.precision.parameter == DType::kFloat32 ? 4 : 2;
  s.gradient_size = group.precision.gradient == DType::kFloat32 ? 4 : 2;
  s.kind = "frozen " + std::to_string(s.parameter_size);
  if (s.trained) {
    s.master = group.precision.master == Master::kFloat32;
    s.kind = group.rule.name + " " + std::to_string(s.parameter_size) + " " +
             std::to_string(s.gradient_size) + (s.master ? " master" : "");
    for (const StateSpec& state : group.rule.states) {
      s.states.push_back(state.name);
    }
  }
  return s;
}

struct Oracle {
  std::vector<OracleUnit> units;
  std::map<std::string, std::uint64_t> class_elements;
  std::uint64_t world = 1;
  Options options;
  const ModelSpec* model = nullptr;

  Oracle(const ModelSpec& described, const Options& chosen, std::uint64_t ranks)
      : world(ranks), options(chosen), model(&described) {
    for (std::size_t u = 0; u < described.units().size(); ++u) {
      units.push_back(make_unit(u));
    }
  }

  // [begin, end) of what a rank owns of a parameter, counted in the segment; empty: begin == end.
  struct Owned {
    std::uint64_t begin = 0, end = 0;
  };
  [[nodiscard]] Owned owned(const OracleSegment& s, const OracleParameter& p,
                            std::uint64_t rank) const {
    const std::uint64_t shard = s.elements / world;
    const std::uint64_t begin = std::max(p.offset, rank * shard);
    const std::uint64_t end = std::min(p.offset + p.count, (rank + 1) * shard);
    return begin < end ? Owned{begin, end} : Owned{};
  }

  [[nodiscard]] std::vector<Extent> extents(std::uint64_t rank, std::size_t unit) const {
    std::vector<Extent> result;
    for (const OracleSegment& s : units[unit].segments) {
      for (const OracleParameter& p : s.parameters) {
        const Owned own = owned(s, p, rank);
        if (own.begin < own.end) {
          result.push_back({static_cast<ParameterId>(p.id), own.begin - p.offset,
                            own.end - own.begin,
                            s.in_class / world + own.begin - rank * (s.elements / world)});
        }
      }
    }
    return result;
  }

  // Bytes of one rank by category.
  [[nodiscard]] std::map<Category, std::uint64_t> bytes(std::uint64_t rank) const {
    std::map<Category, std::uint64_t> sum;
    const int stage = static_cast<int>(options.stage);
    for (const OracleUnit& unit : units) {
      for (const OracleSegment& s : unit.segments) {
        add_array(sum, Category::kParameters, s, rank, stage >= 3, s.parameter_size);
        if (s.trained) {
          add_array(sum, Category::kGradients, s, rank, stage >= 2, 4);
          add_array(sum, Category::kMaster, s, rank, stage >= 1, s.master ? 4 : 0);
          add_array(sum, Category::kStates, s, rank, stage >= 1, 4 * s.states.size());
        }
      }
    }
    for (const std::uint64_t slot : slot_bytes()) {
      sum[Category::kLiveUnits] += slot;
    }
    sum[Category::kBuckets] = static_cast<std::uint64_t>(options.buckets) * bucket_bytes();
    for (const OracleUnit& unit : units) {
      if (unit.until_ready) {
        sum[Category::kBuckets] +=
            static_cast<std::uint64_t>(options.max_open_micro_batches) * unit.gradient_bytes;
      }
    }
    sum[Category::kScratch] =
        4 * (reduce_scratch() + partial_level() * partial_sums()) + table_bytes(rank);
    for (const ModelSpec::UserBytes& user : model->user_bytes()) {
      sum[Category::kUser] += user.bytes;
    }
    return sum;
  }

  // Shared slots in turn, then one for each kUntilReady unit.
  [[nodiscard]] std::vector<std::uint64_t> slot_bytes() const {
    std::vector<std::uint64_t> shared, own;
    std::size_t turn = 0;
    for (const OracleUnit& unit : units) {
      if (options.stage != Stage::kParameters) {
        continue;
      }
      if (unit.until_ready) {
        own.push_back(unit.bytes);
        continue;
      }
      const std::size_t slot = turn++ % static_cast<std::size_t>(options.live_units);
      shared.resize(std::max(shared.size(), slot + 1));
      shared[slot] = std::max(shared[slot], unit.bytes);
    }
    shared.insert(shared.end(), own.begin(), own.end());
    return shared;
  }

  [[nodiscard]] std::uint64_t bucket_bytes() const {
    std::uint64_t largest = 0, all = 0;
    for (const OracleUnit& unit : units) {
      largest = std::max(largest, unit.until_ready ? 0 : unit.gradient_bytes);
      all += unit.until_ready ? 0 : unit.gradient_bytes;
    }
    return padded(std::min(all, std::max<std::uint64_t>(options.bucket_bytes, largest)), 256);
  }

  // The largest shard, in elements, that one bucket or one kUntilReady unit can reduce to.
  [[nodiscard]] std::uint64_t reduce_scratch() const {
    const bool once = static_cast<int>(options.stage) <= 1 && options.numerics == Numerics::kFast;
    if (once || options.numerics == Numerics::kWorldInvariant) {
      return 0;
    }
    std::uint64_t alone = 0, smallest = 100;
    for (const OracleUnit& unit : units) {
      std::uint64_t elements = 0;
      for (const OracleSegment& s : unit.segments) {
        elements += s.trained ? s.elements : 0;
        if (s.trained && s.elements > 0 && !unit.until_ready) {
          smallest = std::min(smallest, s.gradient_size);
        }
      }
      alone = std::max(alone, unit.until_ready ? elements / world : 0);
    }
    const std::uint64_t in_bucket =
        smallest == 100 ? 0 : padded((bucket_bytes() / smallest + world - 1) / world, 256);
    return std::max(alone, in_bucket);
  }

  [[nodiscard]] std::uint64_t partial_sums() const {
    std::uint64_t levels = 0;
    for (int k = options.max_micro_batches; k > 1; k /= 2) {
      ++levels;
    }
    return options.numerics == Numerics::kWorldInvariant ? levels : 0;
  }

  [[nodiscard]] std::uint64_t partial_level() const {
    std::uint64_t elements = 0;
    for (const OracleUnit& unit : units) {
      for (const OracleSegment& s : unit.segments) {
        elements += s.trained ? s.elements / world : 0;
      }
    }
    return elements;
  }

  // Rows of the chunk tables of one rank: its own parts, and at stage 0 those of all.
  [[nodiscard]] std::uint64_t own_rows(const OracleSegment& s, std::uint64_t rank) const {
    std::uint64_t rows = 0;
    for (const OracleParameter& p : s.parameters) {
      const Owned own = owned(s, p, rank);
      rows += (own.end - own.begin + 16'383) / 16'384;
    }
    return rows;
  }
  [[nodiscard]] std::uint64_t updated_rows(const OracleSegment& s, std::uint64_t rank) const {
    if (options.stage != Stage::kReplicated) {
      return own_rows(s, rank);
    }
    std::uint64_t rows = 0;
    for (std::uint64_t r = 0; r < world; ++r) {
      rows += own_rows(s, r);
    }
    return rows;
  }

  [[nodiscard]] std::uint64_t table_bytes(std::uint64_t rank) const {
    std::uint64_t bytes = 0;
    for (const OracleUnit& unit : units) {
      for (const OracleSegment& s : unit.segments) {
        bytes += s.trained ? sizeof(Chunk) * updated_rows(s, rank) : 0;
      }
    }
    const std::uint64_t parameters = model->parameters().size();
    const std::uint64_t control_words = 14 + 2 + world + (parameters + 2) / 3;
    return bytes + parameters * sizeof(ParameterRow) + model->groups().size() * sizeof(Hyper) +
           sizeof(StepInputs) + sizeof(StepScalars) + 8 * control_words;
  }

 private:
  OracleUnit make_unit(std::size_t u) {
    OracleUnit unit;
    unit.until_ready = model->units()[u].life == GradientLife::kUntilReady;
    for (std::uint32_t p = 0; p < model->parameters().size(); ++p) {
      const ModelSpec::Parameter& parameter = model->parameters()[p];
      if (index(parameter.unit) != u) {
        continue;
      }
      OracleSegment fresh = oracle_segment(model->groups()[index(parameter.group)].options);
      auto s = std::find_if(unit.segments.begin(), unit.segments.end(),
                            [&](const OracleSegment& old) { return old.kind == fresh.kind; });
      s = s == unit.segments.end() ? unit.segments.insert(s, fresh) : s;
      s->parameters.push_back({p, s->elements, parameter.count});
      s->elements += padded(parameter.count, 256);
    }
    for (OracleSegment& s : unit.segments) {
      s.elements = padded(s.elements, world * 256);
      s.in_class = class_elements[s.kind];
      class_elements[s.kind] += s.elements;
      s.unit_at = unit.bytes;
      s.gradient_at = unit.gradient_bytes;
      unit.bytes += s.elements * s.parameter_size;
      unit.gradient_bytes += s.trained ? s.elements * s.gradient_size : 0;
    }
    return unit;
  }

  void add_array(std::map<Category, std::uint64_t>& sum, Category category, const OracleSegment& s,
                 std::uint64_t rank, bool sharded, std::uint64_t size) const {
    std::uint64_t real = 0;
    for (const OracleParameter& p : s.parameters) {
      const Owned own = owned(s, p, rank);
      real += sharded ? own.end - own.begin : p.count;
    }
    sum[category] += real * size;
    sum[Category::kPadding] += ((sharded ? s.elements / world : s.elements) - real) * size;
  }
};

}  // namespace zero::testing
