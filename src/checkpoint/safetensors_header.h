// The JSON header of a safetensors file.
//
// file   := length header data
// length := 8 bytes, little-endian: bytes of the header, at most kMostHeaderBytes
// header := {"NAME": {"dtype": "F32", "shape": [..], "data_offsets": [begin, end]}, ..} spaces*
//           with an optional "__metadata__": {"KEY": "TEXT", ..}
// data   := the tensors' elements; [begin, end) count from its start, cover it and never overlap
//
// Source: the format's description in the safetensors README
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>

#include "zero/safetensors.h"

namespace zero {

inline constexpr std::uint64_t kMostHeaderBytes = 100'000'000;  // as the format's own reader

[[nodiscard]] std::uint64_t bytes_of(TensorType type);
[[nodiscard]] std::string_view name_of(TensorType type);

// Throws: CheckpointError naming `path` for anything that the grammar above does not allow
[[nodiscard]] std::map<std::string, TensorInfo> parse_header(std::string_view header,
                                                             std::uint64_t data_bytes,
                                                             const std::string& path);

// `length` and `header` of a file, padded so that the data start at a multiple of 8.
// Throws: CheckpointError naming `path` for a name that is not UTF-8 or a header over the limit
[[nodiscard]] std::string make_header(const std::map<std::string, TensorInfo>& tensors,
                                      const std::string& path);

}  // namespace zero
