// GPT-2 as a ModelSpec: names and layouts of Hugging Face, one unit a block, the head tied to wte.
#pragma once

#include <vector>

#include "zero/model.h"

#include "gpt/shape.h"

namespace gpt {

struct BlockIds {
  zero::UnitId unit{};
  zero::ParameterId ln_1_weight{}, ln_1_bias{};
  zero::ParameterId c_attn_weight{}, c_attn_bias{}, attn_proj_weight{}, attn_proj_bias{};
  zero::ParameterId ln_2_weight{}, ln_2_bias{};
  zero::ParameterId c_fc_weight{}, c_fc_bias{}, mlp_proj_weight{}, mlp_proj_bias{};
};

struct GptModel {
  zero::ModelSpec spec;
  zero::GroupId decay{}, no_decay{};  // two dimensions or more; the others
  zero::UnitId wte{}, wpe{}, ln_f{};
  zero::ParameterId wte_weight{}, wpe_weight{}, ln_f_weight{}, ln_f_bias{};
  std::vector<BlockIds> blocks;
};

// `hyper` with its weight_decay for the group `decay`, without it for the other.
[[nodiscard]] GptModel make_model(const Shape& shape, const zero::Hyper& hyper,
                                  const zero::Precision& precision);

// The standard deviation of a parameter's random start; 0: all `mean`.
struct Start {
  double mean = 0, deviation = 0;
};
[[nodiscard]] Start start_of(const zero::ModelSpec::Parameter& parameter, std::size_t layers);

}  // namespace gpt
