#include "kernels/plan/sm80.h"

namespace flash_attn_ext::plan {

TangentPlan plan_tangents(const attention::TangentParams& p, const Limits& limits) {
  const int bytes = element_bytes(p);
  const int head_dim = sm80::head_dim_bucket(bytes, largest_head_dim(p));
  const bool has_tensor_cores = p.element != attention::ElementType::kFloat64;
  return {.has_kernel = has_tensor_cores && p.score_mod.plain() && !p.dropout.enabled() &&
                        sm80::has_tangent_kernel(bytes, head_dim),
          .head_dim = head_dim,
          .l2_bytes = limits.l2_bytes};
}

}  // namespace flash_attn_ext::plan
