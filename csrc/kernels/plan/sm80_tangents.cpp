#include "kernels/plan/sm80.h"

namespace flash_attn_ext::plan {

TangentPlan plan_tangents(const attention::TangentParams& p, const Limits& limits) {
  using attention::ElementType;
  const int bytes = element_bytes(p);
  const int head_dim = sm80::head_dim_bucket(bytes, largest_head_dim(p));
  // P S' may be larger than the largest float16.
  const bool has_range = p.element == ElementType::kBFloat16 || p.element == ElementType::kFloat32;
  return {.has_kernel =
              has_range && p.score_mod.plain() && !p.dropout.enabled() && sm80::has_tangent_kernel(bytes, head_dim),
          .head_dim = head_dim,
          .l2_bytes = limits.l2_bytes};
}

}  // namespace flash_attn_ext::plan
