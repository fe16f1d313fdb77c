// Plans backward passes whose bias, or a mask as a bias, is written to the workspace first, in a form that kernels
// read.
#include <optional>

#include "attention/aligned_bias.h"
#include "attention/key_bias.h"
#include "kernels/config/key_stationary.h"
#include "kernels/plan/plan.h"
#include "kernels/plan/sm80/sm80.h"
#include "kernels/plan/sm90/sm90.h"

namespace flash_attn_ext::plan {

using attention::BackwardParams;

// The plan of a call with a mask of keys, with the mask as a key bias, which needs no lists of iterations. There is
// none where the key-stationary kernel does not take the call, or would be faster with the lists: without dropout, that
// is where the query tiles of a head are not divided.
std::optional<BackwardPlan> plan_backward_mask_as_bias(const BackwardParams& p, const Limits& limits) {
  if (!may_have_mask_as_bias(p) || largest_head_dim(p) > sm90::kLargestKeyStationaryHeadDim) return std::nullopt;
  const BackwardParams with_bias = attention::with_mask_as_bias(p, p.score_mod.mask.data);
  const int64_t query_tiles = LoopOrder::num_tiles(p.sequences.max_seqlen_q, LoopOrder::kQueries);
  if (!p.dropout.enabled() && !loop_order(with_bias, limits.sms, query_tiles).shares_query_tiles()) return std::nullopt;
  BackwardPlan plan = plan_backward_sm90(with_bias, limits);
  if (plan.kernels != BackwardKernels::kKeyStationary) return std::nullopt;
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
