// Models and options with every odd case in them, from a seed.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "zero/plan.h"

namespace zero::testing {

class RandomModel {
 public:
  explicit RandomModel(std::uint64_t seed) : random_(seed) {}

  [[nodiscard]] std::uint64_t below(std::uint64_t end) { return random_() % end; }

  // Groups of all precisions, some frozen, some empty; units without parameters; parameters of a
  // unit not added one after another; sizes 0, 1, around a multiple of 256, prime and large.
  [[nodiscard]] ModelSpec model() {
    ModelSpec model;
    const std::uint64_t groups = 1 + below(6), units = 1 + below(7), parameters = 1 + below(20);
    for (std::uint64_t g = 0; g < groups; ++g) {
      model.add_group("g" + std::to_string(g), group());
    }
    for (std::uint64_t u = 0; u < units; ++u) {
      model.add_unit("u" + std::to_string(u),
                     below(4) == 0 ? GradientLife::kUntilReady : GradientLife::kBucket);
    }
    for (std::uint64_t p = 0; p < parameters; ++p) {
      model.add(static_cast<UnitId>(below(units)), "p" + std::to_string(p), shape(),
                static_cast<GroupId>(below(groups)),
                below(5) == 0 ? CountInNorm::kNo : CountInNorm::kYes);
    }
    if (below(2) == 0) {
      model.add_user_bytes("activations", below(100'000));
    }
    return model;
  }

  [[nodiscard]] Options options() {
    Options options;
    options.stage = static_cast<Stage>(below(4));
    options.numerics = static_cast<Numerics>(below(3));
    options.max_open_micro_batches = static_cast<int>(1 + below(3));
    options.max_micro_batches = static_cast<int>(1 + below(9));
    options.live_units = static_cast<int>(1 + below(4));
    options.buckets = static_cast<int>(1 + below(3));
    options.bucket_bytes = std::vector<std::size_t>{1, 1000, 1U << 16, 25U << 20}[below(4)];
    return options;
  }

 private:
  GroupOptions group() {
    static const Precision kPrecisions[] = {
        kFloat32Only,
        kBf16WithMaster,
        {DType::kFloat32, DType::kBfloat16, Master::kNone},
        {DType::kBfloat16, DType::kFloat32, Master::kFloat32},
    };
    GroupOptions options{.precision = kPrecisions[below(4)]};
    options.rule = below(3) == 0 ? adam() : adamw();
    if (below(4) == 0) {
      options.rule = {"own", {{"first"}, {"second"}, {"third"}}, Between::kNothing, adamw().cpu};
    }
    options.train = below(3) == 0 ? Train::kFrozen : Train::kYes;
    return options;
  }

  std::vector<std::size_t> shape() {
    switch (below(8)) {
      case 0:
        return {};
      case 1:
        return {0, 1 + below(9)};
      case 2:
        return {1};
      case 3:
        return {255 + below(3)};
      case 4:
        return {1 + below(9), 65'537};
      case 5:
        return {256 * (1 + below(8))};
      default:
        return {1 + below(50), 1 + below(50), 1 + below(2)};
    }
  }

  std::mt19937_64 random_;
};

}  // namespace zero::testing
