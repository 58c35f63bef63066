// Says where two sets of tensors differ first, so that a failing test names parameter and element.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <string>

#include "tests/support/oracle.h"

namespace zero::testing {

// "" when all bits agree, else "h.0.w[3] of 391: 0x1.8p+1 is not 0x1.9p+1 (17 differ)".
[[nodiscard]] inline std::string bit_difference(const ModelSpec& model, const Tensors& found,
                                                const Tensors& expected) {
  if (found.size() != expected.size()) {
    return "not the same number of parameters";
  }
  for (std::size_t p = 0; p < found.size(); ++p) {
    const std::string& name = model.parameters()[p].name;
    if (found[p].size() != expected[p].size()) {
      return name + ": not the same number of elements";
    }
    std::size_t first = found[p].size(), count = 0;
    for (std::size_t i = found[p].size(); i-- > 0;) {
      if (std::bit_cast<std::uint32_t>(found[p][i]) !=
          std::bit_cast<std::uint32_t>(expected[p][i])) {
        first = i;
        ++count;
      }
    }
    if (count > 0) {
      char text[200];
      std::snprintf(text, sizeof text, "[%zu] of %zu: %a is not %a (%zu differ)", first,
                    found[p].size(), static_cast<double>(found[p][first]),
                    static_cast<double>(expected[p][first]), count);
      return name + text;
    }
  }
  return "";
}

// The largest error of all parameters, as tests/golden/README.md defines it.
[[nodiscard]] inline double largest_error(const Tensors& found,
                                          const std::vector<std::vector<double>>& reference) {
  double worst = found.size() == reference.size() ? 0 : std::numeric_limits<double>::infinity();
  for (std::size_t p = 0; p < found.size() && p < reference.size(); ++p) {
    worst = std::max(worst, relative_error<float>(found[p], reference[p]));
  }
  return worst;
}

[[nodiscard]] inline Tensors round_to_bf16(Tensors values) {
  for (std::vector<float>& tensor : values) {
    for (float& x : tensor) {
      x = to_float(to_bf16(x));
    }
  }
  return values;
}

inline constexpr std::array kAllStages{Stage::kReplicated, Stage::kStates, Stage::kGradients,
                                       Stage::kParameters};

[[nodiscard]] inline std::string stage_text(Stage stage) {
  return "stage " + std::to_string(static_cast<int>(stage));
}

// The gradient norms of all steps, to be compared by bits (a skipped step's is NaN).
[[nodiscard]] inline std::vector<std::uint64_t> norm_bits(const RunResult& result) {
  std::vector<std::uint64_t> bits;
  for (const StepResult& step : result.steps) {
    bits.push_back(std::bit_cast<std::uint64_t>(step.grad_norm));
  }
  return bits;
}

// True when the environment asks for the long form of a test (tests/run.sh --all).
[[nodiscard]] inline bool asked_for_all() {
  const char* value = std::getenv("ZERO_TEST_ALL");
  return value != nullptr && std::string(value) == "1";
}

}  // namespace zero::testing
