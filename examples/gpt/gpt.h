// The model over an optimizer: leases unit by unit, forward, backward and the next byte.
#pragma once

#include <cstdint>
#include <span>

#include "zero/optimizer.h"

#include "gpt/leased.h"
#include "gpt/model.h"
#include "gpt/pool.h"
#include "gpt/shape.h"
#include "gpt/workspace.h"

namespace gpt {

// `inputs` and `targets` of whole sequences, one after the other.
struct Tokens {
  std::span<const std::uint8_t> inputs, targets;
};

// All methods are called by all ranks in the same order: at stage 3 they gather.
class Gpt {
 public:
  // Requires: all outlive this
  Gpt(const Shape& shape, const GptModel& model, const Workspace& workspace,
      zero::Optimizer& optimizer, Pool& pool);

  // The mean loss of a micro-batch of whole sequences, in nats; keeps what backward needs.
  [[nodiscard]] double forward(const Tokens& tokens);
  // Of the forward before it; `inputs` are that one's.
  void backward(std::span<const std::uint8_t> inputs, zero::MicroBatch& micro);
  // Logits [256] of the byte after `context`, of 1 to `sequence` bytes. Not between forward and
  // backward: it takes their memory.
  [[nodiscard]] std::span<const float> next_byte(std::span<const std::uint8_t> context);

 private:
  [[nodiscard]] Pass pass(std::size_t rows, std::size_t length) const;
  void blocks_forward(const Pass& pass, std::span<const std::uint8_t> inputs);
  [[nodiscard]] LeasedWeights lease(zero::UnitId unit) const;
  [[nodiscard]] LeasedWeights lease_table() const;

  const Shape& shape_;
  const GptModel& model_;
  const Workspace& workspace_;
  Pool& pool_;
  Lender lender_;
};

}  // namespace gpt
