// Plans backward passes whose bias, or a mask as a bias, is written to the workspace first, in a form that kernels
// read.
#include <optional>

#include "attention/aligned_bias.h"
#include "attention/key_bias.h"
#include "kernels/plan/plan.h"
#include "kernels/plan/sm90/sm90.h"

namespace flash_attn_ext::plan {

using attention::BackwardParams;

// The plan of a call with a mask of keys, with the mask as a key bias, which needs no lists of iterations. There is
// none where the key-stationary kernel does not take the call, or would be faster with the lists: without dropout, that
// is where the query tiles of a head are not divided.
std::optional<BackwardPlan> plan_backward_mask_as_bias(const BackwardParams& p, const Limits& limits) {
  if (!may_have_mask_as_bias(p)) return std::nullopt;
  BackwardPlan plan = plan_backward_sm90(attention::with_mask_as_bias(p, p.score_mod.mask.data), limits);
  if (plan.kernels != BackwardKernels::kKeyStationary) return std::nullopt;
  if (!p.dropout.enabled() && !plan.order.shares_query_tiles()) return std::nullopt;
  plan.workspace.mask_as_bias = append(plan.workspace.bytes, attention::key_bias_bytes(p));
  return plan;
}

std::optional<BackwardPlan> plan_backward_aligned_bias(const BackwardParams& p, const Limits& limits) {
  if (!may_align_bias(p, limits)) return std::nullopt;
  BackwardPlan plan = plan_backward_sm90(attention::with_aligned_bias(p, address_of_copy()), limits);
  const bool reads_boxes = plan.is_warp_specialised() && reads_bias_boxes(plan.dkdv_score);
  if (!reads_boxes && plan.kernels != BackwardKernels::kShortBias) return std::nullopt;
  plan.workspace.aligned_bias = append(plan.workspace.bytes, attention::AlignedBias::of(p).bytes());
  return plan;
}

}  // namespace flash_attn_ext::plan
