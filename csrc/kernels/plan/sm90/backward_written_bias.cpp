// Plans backward passes whose bias, or a mask as a bias, is written to the workspace first, in a form that kernels
// read.
#include <algorithm>
#include <optional>

#include "attention/aligned_bias.h"
#include "attention/key_bias.h"
#include "kernels/config/key_stationary.h"
#include "kernels/plan/plan.h"
#include "kernels/plan/sm80/sm80.h"
#include "kernels/plan/sm90/sm90.h"

namespace flash_attn_ext::plan {

using attention::BackwardParams;

namespace {

// Whether a mask of keys without dropout is better written as a key bias, which allows shares of query tiles. A key
// bias hides whole key tiles only where all heads share it (counts_keys_before_padding); lists always do.
bool gains_from_shares(const BackwardParams& with_bias, const Limits& limits) {
  const int64_t query_tiles = LoopOrder::num_tiles(with_bias.sequences.max_seqlen_q, LoopOrder::kQueries);
  const LoopOrder order = loop_order(with_bias, limits.sms, query_tiles);
  return order.shares_query_tiles() && (order.tiles == 1 || with_bias.score_mod.bias.head_stride == 0);
}

}  // namespace

// The plan of a call with a mask of keys, with the mask as a key bias, which needs no lists of iterations. There is
// none where the key-stationary kernel does not take the call, or would be faster with the lists.
std::optional<BackwardPlan> plan_backward_mask_as_bias(const BackwardParams& p, const Limits& limits) {
  if (!may_have_mask_as_bias(p) || largest_head_dim(p) > sm90::kLargestKeyStationaryHeadDim) return std::nullopt;
  if (std::min(p.sequences.max_seqlen_q, p.sequences.max_seqlen_k) == 0) return std::nullopt;
  const BackwardParams with_bias = attention::with_mask_as_bias(p, p.score_mod.mask.data);
  if (!p.dropout.enabled() && !gains_from_shares(with_bias, limits)) return std::nullopt;
  BackwardPlan plan = plan_backward_sm90(with_bias, limits);
  if (plan.kernels != BackwardKernels::kKeyStationary) return std::nullopt;
  plan.workspace.mask_as_bias = append(plan.workspace.bytes, attention::key_bias_bytes(p));
  return plan;
}

std::optional<BackwardPlan> plan_backward_aligned_bias(const BackwardParams& p, const Limits& limits) {
  if (!may_align_bias(p, limits)) return std::nullopt;
  BackwardPlan plan = plan_backward_sm90(attention::with_aligned_bias(p, address_in_workspace()), limits);
  const bool reads_boxes = plan.is_warp_specialised() && reads_bias_boxes(plan.dkdv_score);
  if (!reads_boxes && plan.kernels != BackwardKernels::kShortBias) return std::nullopt;
  plan.workspace.aligned_bias = append(plan.workspace.bytes, attention::AlignedBias::of(p).bytes());
  return plan;
}

}  // namespace flash_attn_ext::plan
