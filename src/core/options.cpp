#include "zero/options.h"

namespace zero {

std::string_view name_of(Numerics numerics) {
  switch (numerics) {
    case Numerics::kFast:
      return "fast";
    case Numerics::kStageInvariant:
      return "stage-invariant";
    case Numerics::kWorldInvariant:
      return "world-invariant";
  }
  return "unknown numerics";
}

}  // namespace zero
