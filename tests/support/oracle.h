// The unsharded optimizer, written plainly: in double for right values, in the library's fp32
// arithmetic for right bits.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "tests/support/harness.h"

namespace zero::testing {

template <class Real>
struct OracleResult {
  using Values = std::vector<std::vector<Real>>;  // by ParameterId
  std::vector<double> norms;                      // NaN where skipped
  Values master, exp_avg, exp_avg_sq;
  std::vector<std::int64_t> step_counts;
  std::map<int, Values> snapshots;  // masters
};

// Real = double: every sum in double. Real = float: the order and the roundings of the library.
template <class Real>
class Oracle {
 public:
  explicit Oracle(const RunSetup& setup) : setup_(setup) {
    const std::size_t count = model().parameters().size();
    result_.step_counts.assign(count, 0);
    for (std::size_t p = 0; p < count; ++p) {
      std::vector<float> initial(model().parameters()[p].count);
      setup.initial(id(p), 0, initial);
      result_.master.emplace_back(initial.begin(), initial.end());
      result_.exp_avg.emplace_back(initial.size(), Real{0});
      result_.exp_avg_sq.emplace_back(initial.size(), Real{0});
    }
    for (const ModelSpec::Group& group : model().groups()) {
      hypers_.push_back(group.options.hyper);
    }
  }

  OracleResult<Real> run() {
    for (int step = 0; step < setup_.steps; ++step) {
      run_step(step);
      if (setup_.snapshots.contains(step + 1)) {
        result_.snapshots[step + 1] = result_.master;
      }
    }
    return result_;
  }

 private:
  using Row = std::vector<float>;
  struct Scalars {
    Real divisor = 1;
    Real clip_factor = 1;
    double lr_scale = 1;
  };

  [[nodiscard]] const ModelSpec& model() const { return setup_.model; }
  [[nodiscard]] static ParameterId id(std::size_t p) {
    return ParameterId{static_cast<std::uint32_t>(p)};
  }
  [[nodiscard]] const GroupOptions& group_of(std::size_t p) const {
    return model().groups()[index(model().parameters()[p].group)].options;
  }

  void run_step(int step) {
    if (setup_.schedule) {
      for (std::size_t g = 0; g < hypers_.size(); ++g) {
        setup_.schedule(step, GroupId{static_cast<std::uint32_t>(g)}, hypers_[g]);
      }
    }
    std::vector<std::vector<Real>> sums(model().parameters().size());
    std::vector<bool> used(sums.size(), false);
    long double squares = 0;
    for (std::size_t p = 0; p < sums.size(); ++p) {
      if (group_of(p).train == Train::kFrozen) {
        continue;
      }
      sums[p] = sum(contributions(step, p, used));
      for (const Real g : sums[p]) {
        const bool counted = model().parameters()[p].norm == CountInNorm::kYes;
        squares += counted || !std::isfinite(g) ? static_cast<long double>(g) * g : 0.0L;
      }
    }
    const double divisor = find_divisor(step);
    const double norm = static_cast<double>(std::sqrt(squares) / static_cast<long double>(divisor));
    const bool applied = std::isfinite(norm);
    result_.norms.push_back(applied ? norm : std::numeric_limits<double>::quiet_NaN());
    for (std::size_t p = 0; applied && p < sums.size(); ++p) {
      if (used[p]) {
        update_parameter(p, sums[p], scalars(step, norm, divisor));
      }
    }
  }

  [[nodiscard]] StepOptions options_of(int step, int rank) const {
    return setup_.step_options ? setup_.step_options(step, rank) : StepOptions{};
  }

  [[nodiscard]] double find_divisor(int step) const {
    std::uint64_t tokens = 0;
    for (int r = 0; r < setup_.world; ++r) {
      tokens += options_of(step, r).local_tokens.value_or(0);
    }
    return options_of(step, 0).local_tokens
               ? static_cast<double>(tokens)
               : static_cast<double>(setup_.world) * setup_.micro_batches;
  }

  [[nodiscard]] Scalars scalars(int step, double norm, double divisor) const {
    const StepOptions options = options_of(step, 0);
    const std::optional<double> clip =
        options.clip_norm ? options.clip_norm : setup_.options.clip_norm;
    const bool clips = clip && norm > *clip;
    return {.divisor = static_cast<Real>(divisor),
            .clip_factor = clips ? static_cast<Real>(*clip / (norm + 1e-6)) : Real{1},
            .lr_scale = options.lr_scale};
  }

  // [micro-batch][rank]: what each rank hands over, as rounded to the gradient's dtype.
  [[nodiscard]] std::vector<std::vector<Row>> contributions(int step, std::size_t p,
                                                            std::vector<bool>& used) const {
    std::vector<std::vector<Row>> out(static_cast<std::size_t>(setup_.micro_batches));
    for (std::size_t m = 0; m < out.size(); ++m) {
      for (int r = 0; r < setup_.world; ++r) {
        const GradientAt at{step, static_cast<std::int64_t>(m) * setup_.world + r, id(p)};
        Row row(model().parameters()[p].count, 0.0F);
        if (!setup_.unused || !setup_.unused(at)) {
          used[p] = true;
          setup_.gradient(at, row);
        }
        if (group_of(p).precision.gradient == DType::kBfloat16) {
          for (float& g : row) {
            g = to_float(to_bf16(g));
          }
        }
        out[m].push_back(std::move(row));
      }
    }
    return out;
  }

  // Splits at the largest power of two below the number of rows.
  [[nodiscard]] static Row tree(std::span<const Row> rows) {
    if (rows.size() == 1) {
      return rows[0];
    }
    const std::size_t half = std::bit_floor(rows.size() - 1);
    return add(tree(rows.first(half)), tree(rows.subspan(half)));
  }
  [[nodiscard]] static Row fold(std::span<const Row> rows) {
    Row out = rows[0];
    for (std::size_t i = 1; i < rows.size(); ++i) {
      out = add(out, rows[i]);
    }
    return out;
  }
  [[nodiscard]] static Row add(Row a, const Row& b) {
    for (std::size_t i = 0; i < a.size(); ++i) {
      a[i] = a[i] + b[i];
    }
    return a;
  }

  [[nodiscard]] std::vector<Real> sum(const std::vector<std::vector<Row>>& parts) const {
    if constexpr (std::is_same_v<Real, double>) {
      std::vector<double> out(parts[0][0].size(), 0.0);
      for (const std::vector<Row>& ranks : parts) {
        for (const Row& row : ranks) {
          for (std::size_t i = 0; i < out.size(); ++i) {
            out[i] += static_cast<double>(row[i]);
          }
        }
      }
      return out;
    } else {
      return setup_.options.numerics == Numerics::kFast && setup_.options.stage < Stage::kGradients
                 ? micro_batches_first(parts)
                 : ranks_first(parts);
    }
  }
  [[nodiscard]] Row micro_batches_first(const std::vector<std::vector<Row>>& parts) const {
    std::vector<Row> of_rank;
    for (std::size_t r = 0; r < parts[0].size(); ++r) {
      std::vector<Row> rows;
      for (const std::vector<Row>& ranks : parts) {
        rows.push_back(ranks[r]);
      }
      of_rank.push_back(fold(rows));
    }
    return tree(of_rank);
  }
  [[nodiscard]] Row ranks_first(const std::vector<std::vector<Row>>& parts) const {
    std::vector<Row> of_micro;
    for (const std::vector<Row>& ranks : parts) {
      of_micro.push_back(tree(ranks));
    }
    return setup_.options.numerics == Numerics::kWorldInvariant ? tree(of_micro) : fold(of_micro);
  }

  void update_parameter(std::size_t p, const std::vector<Real>& sums, const Scalars& scalars) {
    Hyper hyper = hypers_[index(model().parameters()[p].group)];
    hyper.lr *= scalars.lr_scale;
    const std::int64_t t = ++result_.step_counts[p];
    const bool decoupled = group_of(p).rule == adamw();
    for (std::size_t i = 0; i < sums.size(); ++i) {
      Real g = sums[i] / scalars.divisor;
      if (scalars.clip_factor < Real{1}) {
        g = g * scalars.clip_factor;
      }
      update_element(hyper, t, decoupled,
                     {g, result_.master[p][i], result_.exp_avg[p][i], result_.exp_avg_sq[p][i]});
    }
  }

  struct Element {
    Real g;
    Real &w, &m, &v;
  };
  // Kingma and Ba 2015, Loshchilov and Hutter 2019. The scalars are made in double and rounded.
  static void update_element(const Hyper& h, std::int64_t t, bool decoupled, Element e) {
    const double correction1 = 1 - power(h.beta1, t);
    const double correction2 = 1 - power(h.beta2, t);
    if (decoupled) {
      e.w = e.w * static_cast<Real>(1 - h.lr * h.weight_decay);
    } else {
      e.g = e.g + static_cast<Real>(h.weight_decay) * e.w;
    }
    e.m = static_cast<Real>(h.beta1) * e.m + static_cast<Real>(1 - h.beta1) * e.g;
    e.v = static_cast<Real>(h.beta2) * e.v + static_cast<Real>(1 - h.beta2) * (e.g * e.g);
    const Real root = std::sqrt(e.v) / static_cast<Real>(std::sqrt(correction2));
    e.w = e.w - static_cast<Real>(h.lr / correction1) * (e.m / (root + static_cast<Real>(h.eps)));
  }
  // By squaring, as the library does: std::pow's last bit differs between C libraries.
  [[nodiscard]] static double power(double base, std::int64_t exponent) {
    double out = 1;
    for (; exponent > 0; exponent /= 2, base *= base) {
      out = exponent % 2 == 1 ? out * base : out;
    }
    return out;
  }

  RunSetup setup_;
  std::vector<Hyper> hypers_;
  OracleResult<Real> result_;
};

[[nodiscard]] inline OracleResult<double> right_values(const RunSetup& setup) {
  return Oracle<double>(setup).run();
}
[[nodiscard]] inline OracleResult<float> right_bits(const RunSetup& setup) {
  return Oracle<float>(setup).run();
}

// max |value - reference| / max |reference|: the error of one parameter; 0 when it has no elements.
// Infinite when a value is not finite or the lengths differ.
template <class Value>
[[nodiscard]] double relative_error(std::span<const Value> values,
                                    std::span<const double> reference) {
  double worst = 0, scale = 0;
  for (std::size_t i = 0; i < reference.size() && i < values.size(); ++i) {
    const double error = std::abs(static_cast<double>(values[i]) - reference[i]);
    worst = error <= worst         ? worst
            : std::isfinite(error) ? error
                                   : std::numeric_limits<double>::infinity();
    scale = std::max(scale, std::abs(reference[i]));
  }
  if (values.size() != reference.size()) {
    return std::numeric_limits<double>::infinity();
  }
  return worst == 0 ? 0 : worst / scale;
}

}  // namespace zero::testing
