// The memory of forward and backward: its size is planned, its bytes come from the device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "zero/backend.h"

#include "gpt/layers.h"
#include "gpt/shape.h"

namespace gpt {

enum class Keep : std::uint8_t {
  kActivations,  // all that backward reads
  kInputs,       // the input of each block; backward computes the rest again
};
enum class Element : std::uint8_t { kFloat32, kBfloat16 };  // of leased parameters and gradients

struct WorkspaceOptions {
  Keep keep = Keep::kActivations;
  Element element = Element::kFloat32;
  std::size_t threads = 1;
};

// Where the arrays lie, in elements from the start of their buffer; starts are 256-byte aligned.
// A pass uses them so:
//   normed  input of a product, made block by block; ln_f's output from forward to head_backward
//   wide    forward: output of the GELU. backward: that again, then gradients that block_backward
//           makes for itself
//   grad    forward: output of the last block. backward: the gradient that runs down the model
struct MemoryMap {
  MemoryMap(const Shape& shape, const WorkspaceOptions& options);

  struct BlockAt {
    std::size_t x = 0, qkv = 0, attended = 0, mid = 0, hidden = 0;
  };
  std::vector<BlockAt> blocks;
  std::size_t activations = 0;  // elements, for all blocks
  std::size_t wide = 0, normed = 0, grad = 0, parts = 0, logits = 0, attention = 0;
  std::size_t scratch = 0;  // elements
  // bf16 only: a unit's parameters, the token table, and one gradient, in fp32
  std::size_t unit = 0, table = 0, gradient = 0;
  std::size_t converted = 0;  // elements
};

// What a model of this shape needs beside the optimizer: for ModelSpec::add_user_bytes.
struct UserMemory {
  std::string name;
  std::uint64_t bytes = 0;
};
[[nodiscard]] std::vector<UserMemory> user_memory(const Shape& shape,
                                                  const WorkspaceOptions& options);

class Workspace {
 public:
  Workspace(const Shape& shape, const WorkspaceOptions& options, zero::Backend& device);

  [[nodiscard]] const WorkspaceOptions& options() const { return options_; }
  // The last block's output is grad().
  [[nodiscard]] BlockActivations block(std::size_t index) const;
  [[nodiscard]] float* input(std::size_t block) const;
  [[nodiscard]] const Scratch& scratch() const { return scratch_; }
  [[nodiscard]] float* grad() const { return scratch_memory_.as<float>() + map_.grad; }
  [[nodiscard]] float* logits() const { return scratch_memory_.as<float>() + map_.logits; }
  [[nodiscard]] float* converted_unit() const { return converted_.as<float>() + map_.unit; }
  [[nodiscard]] float* converted_table() const { return converted_.as<float>() + map_.table; }
  [[nodiscard]] float* converted_gradient() const { return converted_.as<float>() + map_.gradient; }

 private:
  WorkspaceOptions options_;
  MemoryMap map_;
  zero::Buffer activations_, scratch_memory_, converted_;
  Scratch scratch_;
};

}  // namespace gpt
