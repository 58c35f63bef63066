#include <array>
#include <utility>

#include "ptx/ast.h"

namespace cuda_on_cpu::ptx {
namespace {

struct Known {
  Type type;
  std::string_view name;
  std::size_t bytes;
};

constexpr std::array<Known, 20> kTypes = {{
    {Type::kPred, "pred", 0},   {Type::kB8, "b8", 1},         {Type::kU8, "u8", 1},
    {Type::kS8, "s8", 1},       {Type::kB16, "b16", 2},       {Type::kU16, "u16", 2},
    {Type::kS16, "s16", 2},     {Type::kB32, "b32", 4},       {Type::kU32, "u32", 4},
    {Type::kS32, "s32", 4},     {Type::kB64, "b64", 8},       {Type::kU64, "u64", 8},
    {Type::kS64, "s64", 8},     {Type::kB128, "b128", 16},    {Type::kF16, "f16", 2},
    {Type::kBf16, "bf16", 2},   {Type::kF32, "f32", 4},       {Type::kF64, "f64", 8},
    {Type::kF16x2, "f16x2", 4}, {Type::kBf16x2, "bf16x2", 4},
}};

}  // namespace

std::string_view type_name(Type type) {
  for (const Known& known : kTypes) {
    if (known.type == type) return known.name;
  }
  return "";
}

Type type_named(std::string_view name) {
  for (const Known& known : kTypes) {
    if (known.name == name) return known.type;
  }
  return Type::kNone;
}

std::size_t type_bytes(Type type) {
  for (const Known& known : kTypes) {
    if (known.type == type) return known.bytes;
  }
  return 0;
}

}  // namespace cuda_on_cpu::ptx
