#include "gpt/workspace.h"

#include <algorithm>

#include "gpt/attention.h"
#include "gpt/gemm.h"

namespace gpt {
namespace {

constexpr std::size_t kAlign = 256 / sizeof(float);

std::size_t aligned(std::size_t elements) {
  return (elements + kAlign - 1) / kAlign * kAlign;
}

// Takes the next `elements` and returns where they start.
std::size_t take(std::size_t& end, std::size_t elements) {
  const std::size_t at = end;
  end += aligned(elements);
  return at;
}

// Of the largest unit but wte, each parameter aligned.
std::size_t unit_elements(const Shape& shape) {
  const std::size_t c = shape.width;
  const std::size_t block = aligned(3 * c * c) + aligned(c * c) + 2 * aligned(4 * c * c) +
                            6 * aligned(c) + aligned(3 * c) + aligned(4 * c);
  return std::max(block, aligned(shape.sequence * c));
}

}  // namespace

MemoryMap::MemoryMap(const Shape& shape, const WorkspaceOptions& options) {
  const std::size_t c = shape.width, n = shape.rows();
  BlockAt one;
  for (std::size_t l = 0; l < shape.layers; ++l) {
    one.x = take(activations, n * c);
    if (l == 0 || options.keep == Keep::kActivations) {
      one.qkv = take(activations, n * 3 * c);
      one.attended = take(activations, n * c);
      one.mid = take(activations, n * c);
      one.hidden = take(activations, n * 4 * c);
    }
    blocks.push_back(one);
  }
  wide = take(scratch, n * 4 * c);
  normed = take(scratch, n * c);
  grad = take(scratch, n * c);
  parts = take(scratch, RowBlocks::kMost * 4 * c);
  logits = take(scratch, n * kVocabulary);
  attention = take(scratch, options.threads * attention_scratch(shape));
  if (options.element == Element::kBfloat16) {
    unit = take(converted, unit_elements(shape));
    table = take(converted, kVocabulary * c);
    gradient = take(converted, std::max({4 * c * c, kVocabulary * c, shape.sequence * c}));
  }
}

std::vector<UserMemory> user_memory(const Shape& shape, const WorkspaceOptions& options) {
  const MemoryMap map(shape, options);
  return {{"activations", map.activations * sizeof(float)},
          {"layer workspace", map.scratch * sizeof(float)},
          {"fp32 copies", map.converted * sizeof(float)}};
}

Workspace::Workspace(const Shape& shape, const WorkspaceOptions& options, zero::Backend& device)
    : options_(options), map_(shape, options) {
  const auto allocate = [&](std::size_t elements) {
    return device.allocate({elements * sizeof(float), zero::Category::kUser});
  };
  activations_ = allocate(map_.activations);
  scratch_memory_ = allocate(map_.scratch);
  converted_ = allocate(map_.converted);
  auto* base = scratch_memory_.as<float>();
  scratch_ = {.wide = base + map_.wide,
              .normed = base + map_.normed,
              .parts = base + map_.parts,
              .attention = base + map_.attention};
}

float* Workspace::input(std::size_t block) const {
  return activations_.as<float>() + map_.blocks[block].x;
}

BlockActivations Workspace::block(std::size_t index) const {
  const MemoryMap::BlockAt& at = map_.blocks[index];
  auto* base = activations_.as<float>();
  return {.x = base + at.x,
          .qkv = base + at.qkv,
          .attended = base + at.attended,
          .mid = base + at.mid,
          .hidden = base + at.hidden,
          .out = index + 1 < map_.blocks.size() ? input(index + 1) : grad()};
}

}  // namespace gpt
