// The arithmetic of the update rules: fp32, only + - * / and sqrt, the same bits on every device.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "zero/host_device.h"
#include "zero/make_rule.h"
#include "zero/update_rule.h"

namespace zero {

// base^exponent by squaring: pow's last bit differs between C libraries.
ZERO_HD double power(double base, std::int64_t exponent) {
  double out = 1;
  for (; exponent > 0; exponent /= 2, base *= base) {
    out = exponent % 2 == 1 ? out * base : out;
  }
  return out;
}

// The two averages that both rules keep. Scalars are computed in double and rounded once.
struct AdamAverages {
  float beta1, rest1, beta2, rest2, root_correction, eps, step_size;

  ZERO_HD AdamAverages(const Hyper& h, std::int64_t step)
      : beta1(static_cast<float>(h.beta1)),
        rest1(static_cast<float>(1 - h.beta1)),
        beta2(static_cast<float>(h.beta2)),
        rest2(static_cast<float>(1 - h.beta2)),
        root_correction(static_cast<float>(std::sqrt(1 - power(h.beta2, step)))),
        eps(static_cast<float>(h.eps)),
        step_size(static_cast<float>(h.lr / (1 - power(h.beta1, step)))) {}

  ZERO_HD float direction(float gradient, float* states) const {
    states[0] = beta1 * states[0] + rest1 * gradient;
    states[1] = beta2 * states[1] + rest2 * (gradient * gradient);
    return states[0] / (square_root(states[1]) / root_correction + eps);
  }
};

struct AdamW {
  static constexpr std::size_t kStates = 2;
  AdamAverages averages;
  float decay;

  ZERO_HD AdamW(const Hyper& h, std::int64_t step)
      : averages(h, step), decay(static_cast<float>(1 - h.lr * h.weight_decay)) {}

  ZERO_HD float propose(float gradient, float /*parameter*/, float* states) const {
    return averages.direction(gradient, states);
  }
  ZERO_HD float apply(float parameter, float proposal) const {
    return parameter * decay - averages.step_size * proposal;
  }
};

struct Adam {
  static constexpr std::size_t kStates = 2;
  AdamAverages averages;
  float weight_decay;

  ZERO_HD Adam(const Hyper& h, std::int64_t step)
      : averages(h, step), weight_decay(static_cast<float>(h.weight_decay)) {}

  ZERO_HD float propose(float gradient, float parameter, float* states) const {
    return averages.direction(gradient + weight_decay * parameter, states);
  }
  ZERO_HD float apply(float parameter, float proposal) const {
    return parameter - averages.step_size * proposal;
  }
};

}  // namespace zero
