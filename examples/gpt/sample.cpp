#include "gpt/sample.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <span>

#include "gpt/weights.h"

namespace gpt {
namespace {

constexpr double kTemperature = 0.8;

// The byte at quantile `where` of the softmax of logits / temperature.
std::uint8_t draw(std::span<const float> logits, double where) {
  const double highest = static_cast<double>(*std::max_element(logits.begin(), logits.end()));
  std::array<double, kVocabulary> until{};
  double total = 0;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    total += std::exp((static_cast<double>(logits[i]) - highest) / kTemperature);
    until.at(i) = total;
  }
  const auto found = std::upper_bound(until.begin(), until.end(), where * total);
  return static_cast<std::uint8_t>(std::min<std::ptrdiff_t>(found - until.begin(), 255));
}

}  // namespace

std::vector<std::uint8_t> sample(Gpt& gpt, const Shape& shape, std::size_t count,
                                 std::uint64_t seed) {
  std::vector<std::uint8_t> context{'\n'}, text;
  for (std::size_t i = 0; i < count; ++i) {
    if (context.size() == shape.sequence && context.size() > 1) {
      const auto half = static_cast<std::ptrdiff_t>(context.size() / 2);
      context.erase(context.begin(), context.begin() + half);
    }
    text.push_back(draw(gpt.next_byte(context), uniform(mix(mix(seed) + i))));
    context.push_back(text.back());
    if (context.size() > shape.sequence) {
      context.erase(context.begin());
    }
  }
  return text;
}

}  // namespace gpt
