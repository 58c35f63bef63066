#include "gpt/model.h"

#include <cmath>
#include <string>
#include <utility>

namespace gpt {
namespace {

class Builder {
 public:
  Builder(const Shape& shape, const zero::Hyper& hyper, const zero::Precision& precision)
      : shape_(shape) {
    zero::Hyper plain = hyper;
    plain.weight_decay = 0;
    model_.decay = model_.spec.add_group("decay", {.hyper = hyper, .precision = precision});
    model_.no_decay = model_.spec.add_group("no_decay", {.hyper = plain, .precision = precision});
  }

  [[nodiscard]] GptModel build() {
    const std::size_t c = shape_.width;
    model_.wte = model_.spec.add_unit("wte", zero::GradientLife::kUntilReady);
    model_.wte_weight = add(model_.wte, "wte.weight", {kVocabulary, c});
    model_.wpe = model_.spec.add_unit("wpe");
    model_.wpe_weight = add(model_.wpe, "wpe.weight", {shape_.sequence, c});
    for (std::size_t l = 0; l < shape_.layers; ++l) {
      model_.blocks.push_back(add_block("h." + std::to_string(l)));
    }
    model_.ln_f = model_.spec.add_unit("ln_f");
    model_.ln_f_weight = add(model_.ln_f, "ln_f.weight", {c});
    model_.ln_f_bias = add(model_.ln_f, "ln_f.bias", {c});
    return std::move(model_);
  }

 private:
  zero::ParameterId add(zero::UnitId unit, std::string name, std::vector<std::size_t> shape) {
    const zero::GroupId group = shape.size() >= 2 ? model_.decay : model_.no_decay;
    return model_.spec.add(unit, std::move(name), std::move(shape), group);
  }

  BlockIds add_block(const std::string& name) {
    const std::size_t c = shape_.width;
    BlockIds b;
    b.unit = model_.spec.add_unit(name);
    b.ln_1_weight = add(b.unit, name + ".ln_1.weight", {c});
    b.ln_1_bias = add(b.unit, name + ".ln_1.bias", {c});
    b.c_attn_weight = add(b.unit, name + ".attn.c_attn.weight", {c, 3 * c});
    b.c_attn_bias = add(b.unit, name + ".attn.c_attn.bias", {3 * c});
    b.attn_proj_weight = add(b.unit, name + ".attn.c_proj.weight", {c, c});
    b.attn_proj_bias = add(b.unit, name + ".attn.c_proj.bias", {c});
    b.ln_2_weight = add(b.unit, name + ".ln_2.weight", {c});
    b.ln_2_bias = add(b.unit, name + ".ln_2.bias", {c});
    b.c_fc_weight = add(b.unit, name + ".mlp.c_fc.weight", {c, 4 * c});
    b.c_fc_bias = add(b.unit, name + ".mlp.c_fc.bias", {4 * c});
    b.mlp_proj_weight = add(b.unit, name + ".mlp.c_proj.weight", {4 * c, c});
    b.mlp_proj_bias = add(b.unit, name + ".mlp.c_proj.bias", {c});
    return b;
  }

  const Shape& shape_;
  GptModel model_;
};

}  // namespace

GptModel make_model(const Shape& shape, const zero::Hyper& hyper,
                    const zero::Precision& precision) {
  return Builder(shape, hyper, precision).build();
}

Start start_of(const zero::ModelSpec::Parameter& parameter, std::size_t layers) {
  const std::string& name = parameter.name;
  if (parameter.shape.size() < 2) {
    return {.mean = name.ends_with(".weight") ? 1.0 : 0.0};  // of a layer norm
  }
  if (name == "wpe.weight") {
    return {.deviation = 0.01};
  }
  const bool residual = name.ends_with("c_proj.weight");
  return {.deviation = residual ? 0.02 / std::sqrt(2.0 * static_cast<double>(layers)) : 0.02};
}

}  // namespace gpt
