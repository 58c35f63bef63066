// Declarations of variables and registers.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "ptx/ast.h"
#include "ptx/reader.h"

namespace cuda_on_cpu::ptx {

// Reads a variable from its state space on: ".align 4 .b8 name[16] = {1, 2}" (the space was taken).
// Stops before what follows (';', ',' or ')').
[[nodiscard]] Variable read_variable(Reader& reader, Space space);

// Reads "(.param .b32 a, .reg .f32 b)"; nothing if there is no '('.
[[nodiscard]] std::vector<Variable> read_parameters(Reader& reader);

// The space of ".global" and so on.
[[nodiscard]] std::optional<Space> space_named(std::string_view word);

// The bits of "0f3f800000", "0d3ff0000000000000" or "1.5" (64 bits); false if it is no such number.
[[nodiscard]] bool float_literal(std::string_view text, std::uint64_t* bits, int* width);

}  // namespace cuda_on_cpu::ptx
