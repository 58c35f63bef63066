#include "checkpoint/safetensors_header.h"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "zero/error.h"

namespace zero {
namespace {

using nlohmann::json;

constexpr std::pair<std::string_view, TensorType> kTypes[] = {
    {"F64", TensorType::kFloat64},   {"F32", TensorType::kFloat32}, {"F16", TensorType::kFloat16},
    {"BF16", TensorType::kBfloat16}, {"I64", TensorType::kInt64},   {"I32", TensorType::kInt32},
    {"U8", TensorType::kUint8},      {"BOOL", TensorType::kBool},
};
constexpr std::size_t kMostDimensions = 64;
constexpr std::string_view kMetadataName = "__metadata__";

[[noreturn]] void fail(const std::string& path, const std::string& problem) {
  throw CheckpointError(path + ": " + problem + "; it is not a well-formed safetensors file", path);
}

std::string in_quotes(std::string_view name) {
  constexpr std::size_t kMostShown = 100;
  return "\"" + std::string(name.substr(0, kMostShown)) + (name.size() > kMostShown ? "..." : "") +
         "\"";
}

// Takes the header apart while it is parsed, so that nothing but well-formed tensors is kept: a
// tree of the whole text could be many times its size.
class HeaderReader final : public nlohmann::json_sax<json> {
 public:
  explicit HeaderReader(const std::string& path) : path_(path) {}

  std::map<std::string, TensorInfo> tensors;

  bool start_object(std::size_t) override {
    switch (at_) {
      case At::kStart:
        return move_to(At::kNames);
      case At::kTensor:
        type_.reset();
        shape_.reset();
        offsets_.reset();
        return move_to(At::kFields);
      case At::kMetadata:
        return move_to(At::kMetadataKeys);
      default:
        return unexpected("an object");
    }
  }

  bool key(std::string& text) override {
    if (at_ == At::kNames) {
      require_new(names_, text);
      name_ = text;
      return move_to(text == kMetadataName ? At::kMetadata : At::kTensor);
    }
    if (at_ == At::kMetadataKeys) {
      require_new(metadata_keys_, text);
      return move_to(At::kMetadataText);
    }
    if (text == "dtype" && !type_) {
      return move_to(At::kType);
    }
    if ((text == "shape" && !shape_) || (text == "data_offsets" && !offsets_)) {
      list_ = text == "shape" ? &shape_ : &offsets_;
      return move_to(At::kListStart);
    }
    fail(path_, in_quotes(name_) + ": expected dtype, shape and data_offsets once each, found " +
                    in_quotes(text));
  }

  bool string(std::string& text) override {
    if (at_ == At::kMetadataText) {
      return move_to(At::kMetadataKeys);
    }
    if (at_ != At::kType) {
      return unexpected(in_quotes(text));
    }
    const auto found = std::find_if(std::begin(kTypes), std::end(kTypes),
                                    [&](const auto& type) { return type.first == text; });
    if (found == std::end(kTypes)) {
      fail(path_, in_quotes(name_) + ": expected a dtype that this library knows (F64, F32, F16, " +
                      "BF16, I64, I32, U8, BOOL), found " + in_quotes(text));
    }
    type_ = found->second;
    return move_to(At::kFields);
  }

  bool start_array(std::size_t) override {
    if (at_ != At::kListStart) {
      return unexpected("an array");
    }
    list_->emplace();
    return move_to(At::kList);
  }

  bool number_unsigned(std::uint64_t value) override {
    if (at_ != At::kList || (*list_)->size() == kMostDimensions) {
      return unexpected(std::to_string(value));
    }
    (*list_)->push_back(value);
    return true;
  }

  bool end_array() override { return move_to(At::kFields); }

  bool end_object() override {
    if (at_ == At::kFields) {
      keep_tensor();
    }
    return move_to(at_ == At::kNames ? At::kEnd : At::kNames);
  }

  bool null() override { return unexpected("null"); }
  bool boolean(bool) override { return unexpected("a boolean"); }
  bool number_integer(std::int64_t value) override { return unexpected(std::to_string(value)); }
  bool number_float(double, const std::string& text) override {
    return unexpected(in_quotes(text));
  }
  bool binary(json::binary_t&) override { return unexpected("binary data"); }
  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception&) override {
    fail(path_,
         "expected JSON, found an error at byte " + std::to_string(position) + " of the header");
  }

 private:
  // What the next token must be.
  enum class At {
    kStart,         // {
    kNames,         // a tensor's name, or the end
    kTensor,        // { of a tensor
    kFields,        // a key of a tensor, or its end
    kType,          // text
    kListStart,     // [
    kList,          // a whole number, or the end
    kMetadata,      // {
    kMetadataKeys,  // a key, or the end
    kMetadataText,
    kEnd,
  };

  bool move_to(At next) {
    at_ = next;
    return true;
  }

  bool unexpected(const std::string& found) {
    fail(path_, (name_.empty() ? "" : "after the name " + in_quotes(name_) + ": ") +
                    "expected {\"NAME\": {\"dtype\": .., \"shape\": [whole numbers], "
                    "\"data_offsets\": [begin, end]}}, found " +
                    found + " in another place");
  }

  void require_new(std::set<std::string>& seen, const std::string& text) {
    if (!seen.insert(text).second) {
      fail(path_, "expected each name once, found " + in_quotes(text) + " again");
    }
  }

  void keep_tensor() {
    if (!type_ || !shape_ || !offsets_ || offsets_->size() != 2) {
      fail(path_, in_quotes(name_) + ": expected dtype, shape and two data_offsets, found less");
    }
    TensorInfo& tensor = tensors[name_];
    tensor.type = *type_;
    tensor.shape.assign(shape_->begin(), shape_->end());
    tensor.begin = (*offsets_)[0];
    tensor.end = (*offsets_)[1];
  }

  using List = std::optional<std::vector<std::uint64_t>>;

  const std::string& path_;
  At at_ = At::kStart;
  std::string name_;
  std::set<std::string> names_, metadata_keys_;
  std::optional<TensorType> type_;
  List shape_, offsets_;
  List* list_ = nullptr;
};

// Empty where 64 bits do not hold it.
std::optional<std::uint64_t> bytes_of(const TensorInfo& tensor) {
  std::uint64_t bytes = bytes_of(tensor.type);
  bool fits = true;
  for (const std::size_t dimension : tensor.shape) {
    if (dimension == 0) {
      return 0;
    }
    fits = fits && !__builtin_mul_overflow(bytes, dimension, &bytes);
  }
  return fits ? std::optional(bytes) : std::nullopt;
}

void check_lengths(const std::map<std::string, TensorInfo>& tensors, const std::string& path) {
  for (const auto& [name, tensor] : tensors) {
    const std::optional<std::uint64_t> wanted = bytes_of(tensor);
    if (tensor.end < tensor.begin || wanted != tensor.end - tensor.begin) {
      fail(path, in_quotes(name) + ": expected data_offsets that hold the shape's " +
                     (wanted ? std::to_string(*wanted) + " bytes" : "bytes (over 2^64)") +
                     ", found [" + std::to_string(tensor.begin) + ", " +
                     std::to_string(tensor.end) + "]");
    }
  }
}

void check_cover(const std::map<std::string, TensorInfo>& tensors, std::uint64_t data_bytes,
                 const std::string& path) {
  std::vector<std::pair<std::pair<std::uint64_t, std::uint64_t>, const std::string*>> spans;
  spans.reserve(tensors.size());
  for (const auto& [name, tensor] : tensors) {
    spans.push_back({{tensor.begin, tensor.end}, &name});
  }
  std::sort(spans.begin(), spans.end());
  std::uint64_t covered = 0;
  for (const auto& [span, name] : spans) {
    if (span.first != covered) {
      fail(path, in_quotes(*name) + ": expected it to start at byte " + std::to_string(covered) +
                     " of the data, found " + std::to_string(span.first) +
                     (span.first > covered ? " (a hole)" : " (an overlap)"));
    }
    covered = span.second;
  }
  if (covered != data_bytes) {
    fail(path, "expected " + std::to_string(covered) + " bytes of data, found " +
                   std::to_string(data_bytes));
  }
}

}  // namespace

std::uint64_t bytes_of(TensorType type) {
  switch (type) {
    case TensorType::kFloat64:
    case TensorType::kInt64:
      return 8;
    case TensorType::kFloat32:
    case TensorType::kInt32:
      return 4;
    case TensorType::kFloat16:
    case TensorType::kBfloat16:
      return 2;
    default:
      return 1;
  }
}

std::string_view name_of(TensorType type) {
  const auto found = std::find_if(std::begin(kTypes), std::end(kTypes),
                                  [&](const auto& known) { return known.second == type; });
  return found == std::end(kTypes) ? "unknown type" : found->first;
}

std::map<std::string, TensorInfo> parse_header(std::string_view header, std::uint64_t data_bytes,
                                               const std::string& path) {
  // The parser skips a byte-order mark and takes a zero byte for the end of the text.
  if (header.empty() || header.front() != '{' || header.find('\0') != header.npos) {
    fail(path, "expected a header of JSON text that starts with {, found other bytes");
  }
  HeaderReader reader(path);
  if (!json::sax_parse(header.begin(), header.end(), &reader)) {
    fail(path, "expected a header of JSON text, found other bytes");
  }
  check_lengths(reader.tensors, path);
  check_cover(reader.tensors, data_bytes, path);
  return std::move(reader.tensors);
}

std::string make_header(const std::map<std::string, TensorInfo>& tensors, const std::string& path) {
  json header = json::object();
  for (const auto& [name, tensor] : tensors) {
    header[name] = {{"dtype", name_of(tensor.type)},
                    {"shape", tensor.shape},
                    {"data_offsets", {tensor.begin, tensor.end}}};
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const json::type_error&) {
    throw CheckpointError(path + ": expected names of tensors in UTF-8, found other bytes; rename",
                          path);
  }
  constexpr std::size_t kAlign = 8;
  text.resize((text.size() + kAlign - 1) / kAlign * kAlign, ' ');
  if (text.size() > kMostHeaderBytes) {
    throw CheckpointError(path + ": expected a header of at most " +
                              std::to_string(kMostHeaderBytes) + " bytes, found " +
                              std::to_string(text.size()) + "; write several files",
                          path);
  }
  std::string length(kAlign, '\0');
  for (std::size_t byte = 0; byte < kAlign; ++byte) {
    length[byte] = static_cast<char>(text.size() >> (8 * byte) & 0xffU);
  }
  return length + text;
}

}  // namespace zero
