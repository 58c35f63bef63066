// The user's own code: a two-layer net over raw pointers, its data, and AdamW by hand.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

inline constexpr std::size_t kInputs = 16, kHidden = 64, kRows = 96;
inline constexpr int kSteps = 200;
inline constexpr double kLearningRate = 1e-2;
// One buffer: [kHidden, kInputs] of the first layer, [kHidden] of the second.
inline constexpr std::size_t kWeights = kHidden * kInputs + kHidden;

// Noise in [-1, 1) that depends on nothing but its number.
inline float noise(std::uint64_t number) {
  std::uint64_t x = (number + 1) * 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return static_cast<float>((x ^ (x >> 31)) >> 40) / static_cast<float>(1 << 23) - 1.0F;
}

inline void initial_weights(std::uint64_t first, std::span<float> out) {
  for (std::size_t i = 0; i < out.size(); ++i) {
    out[i] = 0.25F * noise(first + i);
  }
}

struct Batch {
  std::vector<float> inputs, targets;
};

// The rows of a step that belong to this rank: all of them when it is alone.
inline Batch training_batch(int step, int rank, int world) {
  const std::size_t rows = kRows / static_cast<std::size_t>(world);
  const std::size_t first =
      static_cast<std::size_t>(step) * kRows + static_cast<std::size_t>(rank) * rows;
  Batch batch;
  for (std::size_t row = first; row < first + rows; ++row) {
    float sum = 0;
    for (std::size_t i = 0; i < kInputs; ++i) {
      batch.inputs.push_back(noise((1ULL << 32) + row * kInputs + i));
      sum += batch.inputs.back() * noise((1ULL << 33) + i);
    }
    batch.targets.push_back(std::sin(sum));
  }
  return batch;
}

// Forward and backward of mean((w2 . tanh(w1 x) - y)^2). Returns the loss; overwrites `gradient`.
inline float backward(const float* weights, const Batch& batch, float* gradient) {
  const float *w1 = weights, *w2 = weights + kHidden * kInputs;
  float *g1 = gradient, *g2 = gradient + kHidden * kInputs;
  std::fill(gradient, gradient + kWeights, 0.0F);
  const auto rows = static_cast<float>(batch.targets.size());
  float loss = 0;
  for (std::size_t row = 0; row < batch.targets.size(); ++row) {
    const float* x = batch.inputs.data() + row * kInputs;
    float hidden[kHidden], y = 0;
    for (std::size_t h = 0; h < kHidden; ++h) {
      float sum = 0;
      for (std::size_t i = 0; i < kInputs; ++i) {
        sum += w1[h * kInputs + i] * x[i];
      }
      hidden[h] = std::tanh(sum);
      y += w2[h] * hidden[h];
    }
    const float error = y - batch.targets[row];
    loss += error * error / rows;
    for (std::size_t h = 0; h < kHidden; ++h) {
      const float d_y = 2 * error / rows;
      g2[h] += d_y * hidden[h];
      const float d_hidden = d_y * w2[h] * (1 - hidden[h] * hidden[h]);
      for (std::size_t i = 0; i < kInputs; ++i) {
        g1[h * kInputs + i] += d_hidden * x[i];
      }
    }
  }
  return loss;
}

// What every training program has somewhere; after.cpp needs it no more.
class AdamW {
 public:
  explicit AdamW(std::size_t count) : exp_avg_(count), exp_avg_sq_(count) {}

  void step(float* weights, const float* gradient) {
    constexpr float kBeta1 = 0.9F, kBeta2 = 0.999F, kEps = 1e-8F;
    ++steps_;
    const double bc1 = 1 - std::pow(0.9, steps_), bc2 = 1 - std::pow(0.999, steps_);
    const auto step_size = static_cast<float>(kLearningRate / bc1);
    const auto root = static_cast<float>(std::sqrt(bc2));
    for (std::size_t i = 0; i < exp_avg_.size(); ++i) {
      const float g = gradient[i];
      exp_avg_[i] = kBeta1 * exp_avg_[i] + (1 - kBeta1) * g;
      exp_avg_sq_[i] = kBeta2 * exp_avg_sq_[i] + (1 - kBeta2) * g * g;
      weights[i] -= step_size * exp_avg_[i] / (std::sqrt(exp_avg_sq_[i]) / root + kEps);
    }
  }

 private:
  std::vector<float> exp_avg_, exp_avg_sq_;
  int steps_ = 0;
};
