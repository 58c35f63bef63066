#include "gpt/weights.h"

#include <cmath>
#include <numbers>
#include <optional>
#include <sstream>
#include <vector>

#include "zero/error.h"
#include "zero/safetensors.h"

namespace gpt {
namespace {

std::string shape_text(const std::vector<std::size_t>& shape) {
  std::ostringstream out;
  for (std::size_t i = 0; i < shape.size(); ++i) {
    out << (i == 0 ? "[" : ", ") << shape[i];
  }
  out << (shape.empty() ? "[]" : "]");
  return out.str();
}

bool is_real(zero::TensorType type) {
  return type == zero::TensorType::kFloat64 || type == zero::TensorType::kFloat32 ||
         type == zero::TensorType::kFloat16 || type == zero::TensorType::kBfloat16;
}

void check_tensors(const std::string& path, const zero::SafetensorsReader& reader,
                   const zero::ModelSpec& spec) {
  const std::string start = "--init '" + path + "': ";
  for (const auto& p : spec.parameters()) {
    const auto found = reader.tensors().find(p.name);
    if (found == reader.tensors().end()) {
      throw Refusal(start + "expected a tensor '" + p.name + "' of shape " + shape_text(p.shape) +
                    ", found none");
    }
    if (found->second.shape != p.shape || !is_real(found->second.type)) {
      throw Refusal(start + "expected '" + p.name + "' to be floating point of shape " +
                    shape_text(p.shape) + ", found " +
                    (is_real(found->second.type) ? "" : "integers of ") + "shape " +
                    shape_text(found->second.shape));
    }
  }
  if (reader.tensors().size() != spec.parameters().size()) {
    throw Refusal(start + "expected the model's " + std::to_string(spec.parameters().size()) +
                  " tensors, found " + std::to_string(reader.tensors().size()) +
                  ": is it of a model with other --layers?");
  }
}

// Element `i` of a stream of standard normal numbers. Source: Box and Muller 1958
double normal(std::uint64_t seed, std::uint64_t i) {
  const std::uint64_t bits = mix(seed + i);
  const double radius = std::sqrt(-2 * std::log1p(-uniform(bits)));
  return radius * std::cos(2 * std::numbers::pi * uniform(mix(bits)));
}

}  // namespace

std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15U;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31);
}

double uniform(std::uint64_t bits) {
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

void check_init(const std::string& path, const zero::ModelSpec& spec) {
  try {
    check_tensors(path, zero::SafetensorsReader(path), spec);
  } catch (const zero::CheckpointError& error) {
    throw Refusal("--init: " + std::string(error.what()));
  }
}

void initialize(zero::Optimizer& optimizer, const zero::ModelSpec& spec, const Settings& settings) {
  std::optional<zero::SafetensorsReader> reader;
  if (settings.init.has_value()) {
    reader.emplace(*settings.init);
  }
  optimizer.initialize([&](zero::ParameterId id, std::uint64_t first, std::span<float> out) {
    const auto& parameter = spec.parameters()[zero::index(id)];
    if (reader.has_value()) {
      reader->read(parameter.name, first, out);
      return;
    }
    const Start start = start_of(parameter, settings.shape.layers);
    const std::uint64_t seed = mix(mix(settings.seed) + zero::index(id));
    for (std::size_t i = 0; i < out.size(); ++i) {
      const double noise = start.deviation > 0 ? start.deviation * normal(seed, first + i) : 0;
      out[i] = static_cast<float>(start.mean + noise);
    }
  });
}

void save_weights(const zero::Optimizer& optimizer, const zero::ModelSpec& spec,
                  const std::string& path, int rank) {
  std::optional<zero::SafetensorsWriter> writer;
  if (rank == 0) {
    std::vector<zero::SafetensorsWriter::Entry> entries;
    for (const auto& p : spec.parameters()) {
      entries.push_back({p.name, p.shape});
    }
    writer.emplace(path, entries);
  }
  optimizer.visit_all(zero::Values::kMaster, [&](zero::ParameterId id, std::uint64_t first,
                                                 std::span<const float> values) {
    writer->write(spec.parameters()[zero::index(id)].name, first, values);
  });
  if (writer.has_value()) {
    writer->finish();
  }
}

}  // namespace gpt
