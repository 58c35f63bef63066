// Reads and writes safetensors files: named arrays behind a JSON header.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace zero {

enum class TensorType : std::uint8_t {
  kFloat64,
  kFloat32,
  kFloat16,
  kBfloat16,
  kInt64,
  kInt32,
  kUint8,
  kBool
};

struct TensorInfo {
  TensorType type{};
  std::vector<std::size_t> shape;
  std::uint64_t begin = 0, end = 0;  // bytes, from the end of the header
  [[nodiscard]] std::uint64_t count() const;
};

// An open file; headers are validated on opening, data are read when asked for.
// Source: the format's description in the safetensors README
class SafetensorsReader {
 public:
  // Throws: CheckpointError (path, what was expected and found) for anything that is not a
  //         well-formed file: sizes, overlaps, holes, unknown types, duplicate names
  explicit SafetensorsReader(const std::string& path);
  SafetensorsReader(SafetensorsReader&&) noexcept;
  ~SafetensorsReader();

  [[nodiscard]] const std::map<std::string, TensorInfo>& tensors() const;
  // Elements [first, first + out.size()) as fp32 (from F32, F16, BF16, F64) or fp64.
  // Throws: CheckpointError for an unknown name, a range outside, or a short file
  void read(const std::string& name, std::uint64_t first, std::span<float> out) const;
  void read(const std::string& name, std::uint64_t first, std::span<double> out) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Writes F32 tensors whose names and shapes are known before their values. The file appears under
// its name only when finish() has returned: until then it is `path` + ".partial", with a
// number behind it where a file of that name is there already.
class SafetensorsWriter {
 public:
  struct Entry {
    std::string name;
    std::vector<std::size_t> shape;
  };
  // Throws: CheckpointError when the file cannot be made
  SafetensorsWriter(const std::string& path, const std::vector<Entry>& entries);
  SafetensorsWriter(SafetensorsWriter&&) noexcept;
  ~SafetensorsWriter();  // removes an unfinished file

  // Writes elements [first, first + values.size()), in any order.
  void write(const std::string& name, std::uint64_t first, std::span<const float> values);
  // Throws: CheckpointError when an element was never written, or the disk refuses
  void finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace zero
