// Finds the PTX that nvcc embeds in a host binary.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace cuda_on_cpu::ptx {

// Returns the PTX of a fat binary (magic 0xBA55ED50), decompressed, for the highest architecture
// <= `most` (80 is compute_80).
//
// Throws: SyntaxError if there is none, which says what there is and how to compile
[[nodiscard]] std::string of_fat_binary(std::span<const std::byte> binary, int most);

// Returns all PTX texts of all fat binaries that stand in a file (object, library or program): a
// search for the magic, so that no ELF reader is needed.
[[nodiscard]] std::vector<std::string> of_file(std::string_view path);

}  // namespace cuda_on_cpu::ptx
