// Leases of a unit as the layers want them: fp32 pointers, whatever the precision of the lease.
#pragma once

#include <cstddef>
#include <vector>

#include "zero/optimizer.h"

#include "gpt/layers.h"
#include "gpt/pool.h"
#include "gpt/workspace.h"

namespace gpt {

// Who leases what, and through which memory bf16 is converted.
struct Lender {
  zero::Optimizer& optimizer;
  const zero::ModelSpec& spec;
  const Workspace& workspace;
  Pool& pool;
  [[nodiscard]] bool is_bf16() const { return workspace.options().element == Element::kBfloat16; }
};

// A unit's parameters; in bf16 converted to `copy`, which must not serve two at once.
class LeasedWeights final : public Weights {
 public:
  LeasedWeights(const Lender& lender, zero::UnitId unit, float* copy);
  [[nodiscard]] const float* values(zero::ParameterId parameter) const override;

 private:
  zero::ParameterLease lease_;
  std::size_t first_ = 0;  // parameters of a unit have successive ids
  std::vector<const float*> values_;
};

// A unit's gradients in one micro-batch; in bf16 rounded when each is complete.
class LeasedGradients final : public Gradients {
 public:
  LeasedGradients(const Lender& lender, zero::MicroBatch& micro, zero::UnitId unit);

 private:
  float* open(zero::ParameterId parameter, zero::Write how) override;
  void close(zero::ParameterId parameter) override;

  const Lender& lender_;
  zero::GradientLease lease_;
  zero::bf16* rounded_ = nullptr;  // of the parameter that is open
};

}  // namespace gpt
