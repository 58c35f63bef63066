#include "zero/safetensors.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <optional>
#include <utility>

#include <unistd.h>

#include "zero/dtype.h"
#include "zero/error.h"

#include "checkpoint/file.h"
#include "checkpoint/safetensors_header.h"

namespace zero {
namespace {

static_assert(std::endian::native == std::endian::little, "elements are read and written as bytes");

constexpr std::uint64_t kLengthBytes = 8;

float half_to_float(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 0x1f;
  const auto fraction = static_cast<float>(bits & 0x3ff);
  const float sign = (bits & 0x8000) != 0 ? -1.0F : 1.0F;
  if (exponent == 0x1f) {
    const std::uint32_t payload = static_cast<std::uint32_t>(bits & 0x3ff) << 13;
    return std::copysign(std::bit_cast<float>(0x7f800000U | payload), sign);
  }
  return exponent == 0 ? sign * std::ldexp(fraction, -24)
                       : sign * std::ldexp(1024.0F + fraction, exponent - 25);
}

// Calls put(i, value) for each element stored as `Stored` in `bytes`.
template <class Stored, class Convert, class Value>
void convert(std::span<const std::byte> bytes, Value* out, Convert&& to_value) {
  for (std::size_t i = 0; i * sizeof(Stored) < bytes.size(); ++i) {
    Stored stored;
    std::memcpy(&stored, bytes.data() + i * sizeof(Stored), sizeof(Stored));
    out[i] = static_cast<Value>(to_value(stored));
  }
}

template <class Value>
void convert(TensorType type, std::span<const std::byte> bytes, Value* out) {
  switch (type) {
    case TensorType::kFloat64:
      return convert<double>(bytes, out, [](double x) { return x; });
    case TensorType::kFloat32:
      return convert<float>(bytes, out, [](float x) { return x; });
    case TensorType::kFloat16:
      return convert<std::uint16_t>(bytes, out, half_to_float);
    default:
      return convert<bf16>(bytes, out, [](bf16 x) { return to_float(x); });
  }
}

bool is_real(TensorType type) {
  return type == TensorType::kFloat64 || type == TensorType::kFloat32 ||
         type == TensorType::kFloat16 || type == TensorType::kBfloat16;
}

const TensorInfo& find_tensor(const std::map<std::string, TensorInfo>& tensors,
                              const std::string& name, const std::string& path) {
  const auto found = tensors.find(name);
  if (found == tensors.end()) {
    throw CheckpointError(path + ": expected a tensor \"" + name + "\", found none of that name " +
                              "among " + std::to_string(tensors.size()) + "; check the name",
                          path);
  }
  return found->second;
}

void check_range(const TensorInfo& tensor, const std::string& name, std::uint64_t first,
                 std::uint64_t count, const std::string& path) {
  const std::uint64_t all = tensor.count();
  if (first > all || count > all - first) {
    throw CheckpointError(path + ": tensor \"" + name + "\": expected a range of its " +
                              std::to_string(all) + " elements, found " + std::to_string(count) +
                              " from " + std::to_string(first) + "; check the shape",
                          path);
  }
}

}  // namespace

std::uint64_t TensorInfo::count() const {
  return (end - begin) / bytes_of(type);
}

struct SafetensorsReader::Impl {
  File file;
  std::uint64_t data_at = 0;
  std::map<std::string, TensorInfo> tensors;

  explicit Impl(const std::string& path) : file(File::open_to_read(path)) {
    const std::uint64_t all = file.byte_count();
    std::uint64_t length = 0;
    if (all >= kLengthBytes) {
      file.read(0, std::as_writable_bytes(std::span(&length, 1)));
    }
    if (all < kLengthBytes || length > kMostHeaderBytes || length > all - kLengthBytes) {
      throw CheckpointError(path + ": expected 8 bytes with the length of a header within the " +
                                "file, found a file of " + std::to_string(all) +
                                " bytes and a length of " + std::to_string(length) +
                                "; it is not a safetensors file, or was cut short",
                            path);
    }
    std::string header(length, '\0');
    file.read(kLengthBytes, std::as_writable_bytes(std::span(header)));
    data_at = kLengthBytes + length;
    tensors = parse_header(header, all - data_at, path);
  }

  template <class Value>
  void read(const std::string& name, std::uint64_t first, std::span<Value> out) const {
    const TensorInfo& tensor = find_tensor(tensors, name, file.path());
    check_range(tensor, name, first, out.size(), file.path());
    if (!is_real(tensor.type)) {
      throw CheckpointError(file.path() + ": tensor \"" + name +
                                "\": expected F32, F16, BF16 or F64, found " +
                                std::string(name_of(tensor.type)) + "; convert the file",
                            file.path());
    }
    std::array<std::byte, 1U << 16> buffer{};
    const std::uint64_t bytes = bytes_of(tensor.type);
    const std::uint64_t at_once = buffer.size() / bytes;
    for (std::uint64_t done = 0; done < out.size(); done += at_once) {
      const std::uint64_t count = std::min(at_once, out.size() - done);
      const std::span part = std::span(buffer).first(count * bytes);
      file.read(data_at + tensor.begin + (first + done) * bytes, part);
      convert(tensor.type, part, out.data() + done);
    }
  }
};

SafetensorsReader::SafetensorsReader(const std::string& path)
    : impl_(std::make_unique<Impl>(path)) {}
SafetensorsReader::SafetensorsReader(SafetensorsReader&&) noexcept = default;
SafetensorsReader::~SafetensorsReader() = default;

const std::map<std::string, TensorInfo>& SafetensorsReader::tensors() const {
  return impl_->tensors;
}

void SafetensorsReader::read(const std::string& name, std::uint64_t first,
                             std::span<float> out) const {
  impl_->read(name, first, out);
}

void SafetensorsReader::read(const std::string& name, std::uint64_t first,
                             std::span<double> out) const {
  impl_->read(name, first, out);
}

namespace {

// Which elements of a tensor were written: disjoint ranges that do not touch, begin -> end.
class Written {
 public:
  void add(std::uint64_t begin, std::uint64_t end) {
    auto at = ranges_.upper_bound(begin);
    if (at != ranges_.begin() && std::prev(at)->second >= begin) {
      --at;
      begin = at->first;
    }
    while (at != ranges_.end() && at->first <= end) {
      end = std::max(end, at->second);
      at = ranges_.erase(at);
    }
    ranges_.emplace(begin, end);
  }
  // The first element in [0, count) that was not written; `count` when all were.
  [[nodiscard]] std::uint64_t first_missing(std::uint64_t count) const {
    const bool starts = !ranges_.empty() && ranges_.begin()->first == 0;
    return std::min(count, starts ? ranges_.begin()->second : 0);
  }

 private:
  std::map<std::uint64_t, std::uint64_t> ranges_;
};

std::map<std::string, TensorInfo> lay_out(const std::vector<SafetensorsWriter::Entry>& entries,
                                          const std::string& path) {
  std::map<std::string, TensorInfo> tensors;
  std::uint64_t at = 0;
  for (const SafetensorsWriter::Entry& entry : entries) {
    std::uint64_t bytes = sizeof(float);
    bool fits = true;
    for (const std::size_t dimension : entry.shape) {
      fits = !__builtin_mul_overflow(bytes, dimension, &bytes) && fits;
    }
    const std::uint64_t begin = at;
    fits = !__builtin_add_overflow(at, bytes, &at) && fits;
    const TensorInfo tensor{TensorType::kFloat32, entry.shape, begin, at};
    if (!fits || entry.name == "__metadata__" || !tensors.emplace(entry.name, tensor).second) {
      throw CheckpointError(path + ": expected new names and sizes within 2^64 bytes, found \"" +
                                entry.name + "\" again, reserved or too large; rename or shrink it",
                            path);
    }
  }
  return tensors;
}

}  // namespace

struct SafetensorsWriter::Impl {
  std::string path;
  std::map<std::string, TensorInfo> tensors;
  std::map<std::string, Written> written;
  std::uint64_t data_at = 0;
  std::optional<File> file;  // empty once finished

  Impl(const std::string& target, const std::vector<Entry>& entries)
      : path(target), tensors(lay_out(entries, path)) {
    const std::string header = make_header(tensors, path);
    require_replaceable(path);
    file.emplace(File::create_new(path + ".partial"));
    data_at = header.size();
    file->write(0, std::as_bytes(std::span(header)));
  }

  ~Impl() {
    if (file) {
      ::unlink(file->path().c_str());
    }
  }

  void require_open() const {
    if (!file) {
      throw CheckpointError(
          path + ": expected calls before finish(), found one after it; make a " + "new writer",
          path);
    }
  }
};

SafetensorsWriter::SafetensorsWriter(const std::string& path, const std::vector<Entry>& entries)
    : impl_(std::make_unique<Impl>(path, entries)) {}
SafetensorsWriter::SafetensorsWriter(SafetensorsWriter&&) noexcept = default;
SafetensorsWriter::~SafetensorsWriter() = default;

void SafetensorsWriter::write(const std::string& name, std::uint64_t first,
                              std::span<const float> values) {
  impl_->require_open();
  const TensorInfo& tensor = find_tensor(impl_->tensors, name, impl_->path);
  check_range(tensor, name, first, values.size(), impl_->path);
  if (!values.empty()) {
    impl_->file->write(impl_->data_at + tensor.begin + first * sizeof(float),
                       std::as_bytes(values));
    impl_->written[name].add(first, first + values.size());
  }
}

void SafetensorsWriter::finish() {
  impl_->require_open();
  for (const auto& [name, tensor] : impl_->tensors) {
    const std::uint64_t missing = impl_->written[name].first_missing(tensor.count());
    if (missing != tensor.count()) {
      throw CheckpointError(impl_->path + ": tensor \"" + name + "\": expected all " +
                                std::to_string(tensor.count()) +
                                " elements written, found none for element " +
                                std::to_string(missing) + "; write it before finish()",
                            impl_->path);
    }
  }
  impl_->file->sync();
  replace_file(impl_->file->path(), impl_->path);
  impl_->file.reset();
}

}  // namespace zero
