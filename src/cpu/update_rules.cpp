#include "kernels/update_math.h"

namespace zero {

UpdateRule adamw() {
  return make_rule<AdamW>("adamw", {"exp_avg", "exp_avg_sq"});
}

UpdateRule adam() {
  return make_rule<Adam>("adam", {"exp_avg", "exp_avg_sq"});
}

}  // namespace zero
