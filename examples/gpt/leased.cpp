#include "gpt/leased.h"

#include <algorithm>
#include <span>

#include "gpt/kernels.h"

namespace gpt {
namespace {

// Elements that one task converts.
constexpr std::size_t kPiece = 1U << 16;

template <class From, class To>
void convert_on(Pool& pool, std::span<const From> from, To* to) {
  pool.run((from.size() + kPiece - 1) / kPiece, [&](std::size_t piece, std::size_t) {
    const std::size_t first = piece * kPiece;
    convert(from.subspan(first, std::min(kPiece, from.size() - first)), to + first);
  });
}

constexpr std::size_t kAlign = 256 / sizeof(float);

}  // namespace

LeasedWeights::LeasedWeights(const Lender& lender, zero::UnitId unit, float* copy)
    : lease_(lender.optimizer.parameters(unit, zero::kHost)) {
  const auto& parameters = lender.spec.parameters();
  const auto begin =
      std::lower_bound(parameters.begin(), parameters.end(), unit,
                       [](const auto& p, zero::UnitId wanted) { return p.unit < wanted; });
  first_ = static_cast<std::size_t>(begin - parameters.begin());
  for (std::size_t p = first_; p < parameters.size() && parameters[p].unit == unit; ++p) {
    const auto id = static_cast<zero::ParameterId>(p);
    if (!lender.is_bf16()) {
      values_.push_back(lease_.data<float>(id));
      continue;
    }
    const std::size_t count = parameters[p].count;
    convert_on(lender.pool, std::span(lease_.data<zero::bf16>(id), count), copy);
    values_.push_back(copy);
    copy += (count + kAlign - 1) / kAlign * kAlign;
  }
}

const float* LeasedWeights::values(zero::ParameterId parameter) const {
  return values_[zero::index(parameter) - first_];
}

LeasedGradients::LeasedGradients(const Lender& lender, zero::MicroBatch& micro, zero::UnitId unit)
    : lender_(lender), lease_(micro.gradients(unit, zero::kHost)) {}

float* LeasedGradients::open(zero::ParameterId parameter, zero::Write how) {
  if (!lender_.is_bf16()) {
    return lease_.data<float>(parameter, how);
  }
  rounded_ = lease_.data<zero::bf16>(parameter, how);
  float* exact = lender_.workspace.converted_gradient();
  if (how == zero::Write::kAdd) {
    const std::size_t count = lender_.spec.parameters()[zero::index(parameter)].count;
    convert_on(lender_.pool, std::span<const zero::bf16>(rounded_, count), exact);
  }
  return exact;
}

void LeasedGradients::close(zero::ParameterId parameter) {
  if (lender_.is_bf16()) {
    const std::size_t count = lender_.spec.parameters()[zero::index(parameter)].count;
    const float* exact = lender_.workspace.converted_gradient();
    convert_on(lender_.pool, std::span(exact, count), rounded_);
  }
}

}  // namespace gpt
