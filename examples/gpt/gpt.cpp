#include "gpt/gpt.h"

namespace gpt {
namespace {

HeadWeights head_weights(const GptModel& model, const Weights& norm, const Weights& table) {
  return {.norm_weight = norm.values(model.ln_f_weight),
          .norm_bias = norm.values(model.ln_f_bias),
          .token_table = table.values(model.wte_weight)};
}

}  // namespace

Gpt::Gpt(const Shape& shape, const GptModel& model, const Workspace& workspace,
         zero::Optimizer& optimizer, Pool& pool)
    : shape_(shape),
      model_(model),
      workspace_(workspace),
      pool_(pool),
      lender_{optimizer, model.spec, workspace, pool} {}

Pass Gpt::pass(std::size_t rows, std::size_t length) const {
  return {shape_, {rows / length, length}, workspace_.scratch(), pool_};
}

LeasedWeights Gpt::lease(zero::UnitId unit) const {
  return {lender_, unit, workspace_.converted_unit()};
}

LeasedWeights Gpt::lease_table() const {
  return {lender_, model_.wte, workspace_.converted_table()};
}

void Gpt::blocks_forward(const Pass& pass, std::span<const std::uint8_t> inputs) {
  {
    const LeasedWeights table = lease_table(), positions = lease(model_.wpe);
    embed(pass, table.values(model_.wte_weight), positions.values(model_.wpe_weight), inputs.data(),
          workspace_.input(0));
  }
  for (std::size_t l = 0; l < model_.blocks.size(); ++l) {
    const BlockIds& ids = model_.blocks[l];
    block_forward(pass, ids, lease(ids.unit), workspace_.block(l));
  }
}

double Gpt::forward(const Tokens& tokens) {
  const Pass whole = pass(tokens.inputs.size(), shape_.sequence);
  blocks_forward(whole, tokens.inputs);
  const LeasedWeights norm = lease(model_.ln_f), table = lease_table();
  return head_loss(whole, head_weights(model_, norm, table), workspace_.grad(),
                   tokens.targets.data(), workspace_.logits());
}

void Gpt::backward(std::span<const std::uint8_t> inputs, zero::MicroBatch& micro) {
  const Pass whole = pass(inputs.size(), shape_.sequence);
  float* grad = workspace_.grad();
  {
    const LeasedWeights norm = lease(model_.ln_f), table = lease_table();
    LeasedGradients d_norm(lender_, micro, model_.ln_f), d_table(lender_, micro, model_.wte);
    head_backward(whole, model_, head_weights(model_, norm, table), {d_norm, d_table},
                  workspace_.logits(), grad);
  }
  micro.ready(model_.ln_f, zero::kHost);
  for (std::size_t l = model_.blocks.size(); l-- > 0;) {
    const BlockIds& ids = model_.blocks[l];
    {
      const LeasedWeights weights = lease(ids.unit);
      BlockActivations activations = workspace_.block(l);
      if (workspace_.options().keep == Keep::kInputs) {
        activations.out = nullptr;
        block_forward(whole, ids, weights, activations);
      }
      LeasedGradients gradients(lender_, micro, ids.unit);
      block_backward(whole, ids, weights, gradients, activations, grad);
    }
    micro.ready(ids.unit, zero::kHost);
  }
  {
    LeasedGradients d_positions(lender_, micro, model_.wpe);
    d_positions.write(model_.wpe_weight, zero::Write::kOverwrite,
                      [&](float* out) { embed_backward_positions(whole, grad, out); });
  }
  micro.ready(model_.wpe, zero::kHost);
  {
    LeasedGradients d_table(lender_, micro, model_.wte);
    d_table.write(model_.wte_weight, zero::Write::kAdd,
                  [&](float* out) { embed_backward_tokens(whole, inputs.data(), grad, out); });
  }
  micro.ready(model_.wte, zero::kHost);
}

std::span<const float> Gpt::next_byte(std::span<const std::uint8_t> context) {
  const Pass prefix = pass(context.size(), context.size());
  blocks_forward(prefix, context);
  const LeasedWeights norm = lease(model_.ln_f), table = lease_table();
  head_logits(prefix, head_weights(model_, norm, table),
              workspace_.grad() + (context.size() - 1) * shape_.width, workspace_.logits());
  return {workspace_.logits(), kVocabulary};
}

}  // namespace gpt
