// Forward and backward of the whole model on plain arrays: slopes, threads and recomputation.
#include <cmath>
#include <functional>
#include <span>
#include <vector>

#include <gtest/gtest.h>

#include "zero/cpu.h"

#include "gpt/attention.h"
#include "gpt/gemm.h"
#include "gpt/layers.h"
#include "gpt/weights.h"
#include "gpt/workspace.h"

namespace gpt::testing {
namespace {

using Tensors = std::vector<std::vector<float>>;  // by ParameterId

class Values final : public Weights {
 public:
  explicit Values(const Tensors& tensors) : tensors_(tensors) {}
  [[nodiscard]] const float* values(zero::ParameterId p) const override {
    return tensors_[zero::index(p)].data();
  }

 private:
  const Tensors& tensors_;
};

class Slopes final : public Gradients {
 public:
  explicit Slopes(Tensors& tensors) : tensors_(tensors) {}

 private:
  float* open(zero::ParameterId p, zero::Write) override { return tensors_[zero::index(p)].data(); }
  void close(zero::ParameterId) override {}
  Tensors& tensors_;
};

// One model with random weights and one batch of random bytes.
class Case {
 public:
  Case(const Shape& shape, int threads, Keep keep = Keep::kActivations)
      : shape_(shape),
        model_(make_model(shape, {}, zero::kFloat32Only)),
        pool_(threads),
        device_(zero::make_cpu_backend()),
        workspace_(shape, {.keep = keep, .threads = static_cast<std::size_t>(threads)}, *device_) {
    use_one_blas_thread();
    for (std::size_t p = 0; p < model_.spec.parameters().size(); ++p) {
      const auto& parameter = model_.spec.parameters()[p];
      const double mean = start_of(parameter, shape.layers).mean;
      tensors_.emplace_back();
      for (std::size_t i = 0; i < parameter.count; ++i) {
        tensors_.back().push_back(
            static_cast<float>(mean + 0.3 * (uniform(mix(p * 1'000'000 + i)) - 0.5)));
      }
    }
    for (std::size_t i = 0; i < shape.rows(); ++i) {
      inputs_.push_back(static_cast<std::uint8_t>(mix(i)));
      targets_.push_back(static_cast<std::uint8_t>(mix(i + 77)));
    }
  }

  [[nodiscard]] Tensors& tensors() { return tensors_; }

  double forward() {
    const Values weights(tensors_);
    embed(pass(), weights.values(model_.wte_weight), weights.values(model_.wpe_weight),
          inputs_.data(), workspace_.input(0));
    for (std::size_t l = 0; l < model_.blocks.size(); ++l) {
      block_forward(pass(), model_.blocks[l], weights, workspace_.block(l));
    }
    return head_loss(pass(), head(), workspace_.grad(), targets_.data(), workspace_.logits());
  }

  // Of the forward before it.
  Tensors backward() {
    Tensors out = tensors_;
    const Values weights(tensors_);
    Slopes slopes(out);
    float* grad = workspace_.grad();
    head_backward(pass(), model_, head(), {slopes, slopes}, workspace_.logits(), grad);
    for (std::size_t l = model_.blocks.size(); l-- > 0;) {
      BlockActivations activations = workspace_.block(l);
      if (workspace_.options().keep == Keep::kInputs) {
        activations.out = nullptr;
        block_forward(pass(), model_.blocks[l], weights, activations);
      }
      block_backward(pass(), model_.blocks[l], weights, slopes, activations, grad);
    }
    embed_backward_tokens(pass(), inputs_.data(), grad, out[zero::index(model_.wte_weight)].data());
    embed_backward_positions(pass(), grad, out[zero::index(model_.wpe_weight)].data());
    return out;
  }

 private:
  [[nodiscard]] Pass pass() {
    return {shape_, {shape_.micro_batch, shape_.sequence}, workspace_.scratch(), pool_};
  }
  [[nodiscard]] HeadWeights head() const {
    const Values weights(tensors_);
    return {weights.values(model_.ln_f_weight), weights.values(model_.ln_f_bias),
            weights.values(model_.wte_weight)};
  }

  Shape shape_;
  GptModel model_;
  Pool pool_;
  std::unique_ptr<zero::Ledger> device_;
  Workspace workspace_;
  Tensors tensors_;
  std::vector<std::uint8_t> inputs_, targets_;
};

constexpr Shape kOdd{.layers = 2, .heads = 3, .width = 30, .sequence = 71, .micro_batch = 7};

// Along a random direction of one parameter at a time, so that none can hide behind another.
TEST(GptLayers, HaveTheSlopeThatBackwardSays) {
  Case c(kOdd, 1);
  (void)c.forward();
  const Tensors gradient = c.backward();
  std::size_t checked = 0;
  for (std::size_t p = 0; p < gradient.size(); ++p) {
    const std::vector<float> at = c.tensors()[p];
    double slope = 0, length = 0;
    for (const float g : gradient[p]) {
      length += static_cast<double>(g) * static_cast<double>(g);
    }
    length = std::sqrt(length);
    ASSERT_GT(length, 0) << p;
    // A step along the gradient that changes the loss by about 0.02, far above its rounding.
    const double scale = 0.01 / (length * length);
    std::vector<float> change(at.size());
    for (std::size_t i = 0; i < at.size(); ++i) {
      change[i] = static_cast<float>(scale * static_cast<double>(gradient[p][i]));
      slope += static_cast<double>(change[i]) * static_cast<double>(gradient[p][i]);
    }
    const auto loss_at = [&](float sign) {
      for (std::size_t i = 0; i < at.size(); ++i) {
        c.tensors()[p][i] = at[i] + sign * change[i];
      }
      return c.forward();
    };
    const double measured = (loss_at(1) - loss_at(-1)) / 2;
    c.tensors()[p] = at;
    // The third derivative along so long a step is seen in the third digit.
    EXPECT_NEAR(measured / slope, 1, 0.02) << "parameter " << p;
    ++checked;
  }
  EXPECT_EQ(checked, 28U);
}

TEST(GptLayers, HaveTheSameBitsWithAnyThreads) {
  Case one(kOdd, 1), three(kOdd, 3);
  EXPECT_EQ(one.forward(), three.forward());
  EXPECT_EQ(one.backward(), three.backward());
}

TEST(GptLayers, HaveTheSameBitsWhenComputedAgain) {
  Case kept(kOdd, 2), again(kOdd, 2, Keep::kInputs);
  EXPECT_EQ(kept.forward(), again.forward());
  EXPECT_EQ(kept.backward(), again.backward());
}

TEST(GptLayers, GiveATokenNoLookAtTheNextOnes) {
  const Shape shape{.layers = 1, .heads = 1, .width = 8, .sequence = 3, .micro_batch = 1};
  std::vector<float> qkv(3 * 24), out(3 * 8), other(3 * 8), scratch(attention_scratch(shape));
  for (std::size_t i = 0; i < qkv.size(); ++i) {
    qkv[i] = static_cast<float>(uniform(mix(i)));
  }
  Pool pool(1);
  use_one_blas_thread();
  const Attention attention{shape, {1, 3}, scratch.data()};
  attention_forward(attention, qkv.data(), out.data(), pool);
  for (std::size_t i = 0; i < 8; ++i) {
    EXPECT_FLOAT_EQ(out[i], qkv[16 + i]);  // the first token sees its own value only
    qkv[2 * 24 + 8 + i] = 100;             // the last one's key
  }
  attention_forward(attention, qkv.data(), other.data(), pool);
  EXPECT_TRUE(std::equal(out.begin(), out.begin() + 16, other.begin()));
  EXPECT_FALSE(std::equal(out.begin() + 16, out.end(), other.begin() + 16));
}

TEST(GptWorkspace, TakesWhatItPlans) {
  for (const Keep keep : {Keep::kActivations, Keep::kInputs}) {
    for (const Element element : {Element::kFloat32, Element::kBfloat16}) {
      const WorkspaceOptions options{.keep = keep, .element = element, .threads = 3};
      const auto device = zero::make_cpu_backend();
      const Workspace workspace(kOdd, options, *device);
      std::uint64_t planned = 0;
      for (const UserMemory& memory : user_memory(kOdd, options)) {
        planned += memory.bytes;
      }
      EXPECT_EQ(device->usage().of(zero::Category::kUser), planned);
      EXPECT_EQ(device->usage().peak_bytes, planned);
    }
  }
}

}  // namespace
}  // namespace gpt::testing
