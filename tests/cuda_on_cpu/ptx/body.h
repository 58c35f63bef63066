// The body of a function.
#pragma once

#include <cstddef>
#include <map>
#include <string>

#include "ptx/ast.h"
#include "ptx/reader.h"

namespace cuda_on_cpu::ptx {

struct ModuleNames {
  std::map<std::string, std::size_t, std::less<>> variables;  // index in Module::variables
  std::map<std::string, std::size_t, std::less<>> functions;  // index in Module::functions
};

// Reads "{ ... }" into `function`, whose parameters and results are known.
//
// Throws: SyntaxError
void read_body(Reader& reader, const ModuleNames& names, Function& function);

}  // namespace cuda_on_cpu::ptx
