#include "zero/dtype.h"

namespace zero {

std::string_view name_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "fp32";
    case DType::kBfloat16:
      return "bf16";
    case DType::kFloat16:
      return "fp16";
    case DType::kUint16:
      return "uint16";
    case DType::kUint8:
      return "uint8";
    case DType::kInt64:
      return "int64";
  }
  return "unknown dtype";
}

}  // namespace zero
