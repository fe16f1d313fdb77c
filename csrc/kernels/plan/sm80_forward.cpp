#include "kernels/plan/mask_tiles.h"
#include "kernels/plan/sm80.h"
#include "kernels/plan/split.h"
#include "kernels/plan/workspace.h"
#include "tile/sm80/strides.h"

namespace flash_attn_ext::plan {
namespace {

// The queries of a tile of the kernel for long sequences.
constexpr int kTileQueries = 128;

// Within a tile, the bytes between rows are 32-bit numbers.
bool has_short_strides(const attention::AttentionParams& p) {
  return std::max({p.q.row_stride, p.k.row_stride, p.v.row_stride}) < tile::kLongStride;
}

// Whether the whole-heads kernel runs. It needs all keys of a head at once, and fewer queries would leave rows empty.
bool takes_whole_heads(const attention::ForwardParams& p) {
  const attention::SequenceTable& lengths = p.sequences;
  return attention::is_16_bit(p.element) && score_kind(p.score_mod) == ScoreKind::kScale && !p.dropout.enabled() &&
         p.visibility.unlimited() && !is_packed(p) && p.head_dim_qk == sm80::kHeadsHeadDim &&
         p.head_dim_v == sm80::kHeadsHeadDim && has_short_strides(p) &&
         lengths.max_seqlen_q > sm80::kShortForwardQueries && lengths.max_seqlen_q <= sm80::kHeadsRows &&
         lengths.max_seqlen_k >= sm80::kHeadsKeys && lengths.max_seqlen_k <= sm80::kHeadsRows;
}

// The variant that the scores of a call need, as far as there are kernels for it at a head dim.
Variant choose_variant(const attention::ForwardParams& p, int head_dim) {
  const int bytes = element_bytes(p);
  const ScoreKind kind = score_kind(p.score_mod);
  const auto has = [&](Variant variant) {
    return sm80::has_forward_kernel(bytes, sm80::bucket_of_variant(bytes, head_dim, variant), variant);
  };
  if (kind == ScoreKind::kScale && p.dropout.enabled()) {
    return has(Variant::kDropout) ? Variant::kDropout : Variant::kExtended;
  }
  if (kind == ScoreKind::kBiasMask && !p.dropout.enabled()) {
    return has(Variant::kBiasMask) ? Variant::kBiasMask : Variant::kExtended;
  }
  if (kind != ScoreKind::kScale) return Variant::kExtended;
  const int64_t short_queries = p.visibility.one_sided() ? sm80::kShortCausalQueries : sm80::kShortForwardQueries;
  if (bytes == 2 && head_dim == 64 && p.sequences.max_seqlen_q <= short_queries) return Variant::kShort;
  const bool extended_is_smaller = sm80::forward_tile(bytes, head_dim, Variant::kExtended).queries <
                                   sm80::forward_tile(bytes, head_dim, Variant::kPlain).queries;
  return extended_is_smaller && p.sequences.max_seqlen_q <= kStationaryQueries ? Variant::kExtended : Variant::kPlain;
}

}  // namespace

ForwardPlan plan_forward_sm80(const attention::ForwardParams& p, const Limits& limits) {
  ForwardPlan plan;
  plan.l2_bytes = limits.l2_bytes;
  if (p.element == attention::ElementType::kFloat64) {
    plan.kernel = ForwardKernel::kRows;
    return plan;
  }
  if (is_bound_by_keys(p) || leaves_sms_idle(p, kTileQueries, limits)) {
    return plan_split_forward(p, limits);
  }
  if (takes_whole_heads(p)) {
    plan.kernel = ForwardKernel::kWholeHeads;
    plan.head_dim = sm80::kHeadsHeadDim;
    plan.variant = Variant::kPlain;
    plan.nan_repair = NanRepair::kInKernel;
    plan.persistent_ctas = sm80::kHeadsBlocks * limits.sms;
    return plan;
  }
  const int bytes = element_bytes(p);
  plan.kernel = ForwardKernel::kStreaming;
  plan.head_dim = sm80::head_dim_bucket(bytes, largest_head_dim(p));
  plan.variant = choose_variant(p, plan.head_dim);
  plan.head_dim = sm80::bucket_of_variant(bytes, plan.head_dim, plan.variant);
  plan.tf32 =
      p.allow_tf32 && plan.variant == Variant::kPlain && bytes == 4 && plan.head_dim <= sm80::kLargestTf32HeadDim;
  plan.tile = sm80::forward_tile(bytes, plan.head_dim, plan.variant);
  plan.nan_repair = sm80::repairs_in_kernel(plan.head_dim, plan.variant) ? NanRepair::kInKernel : NanRepair::kOwnLaunch;
  if (p.score_mod.mask.present()) {
    plan.workspace.mask_tiles = append(plan.workspace.bytes, count_mask_tiles(p).total());
  }
  if (plan.nan_repair == NanRepair::kOwnLaunch) {
    const int64_t blocks = p.batch * p.num_heads_q * sm80::num_tiles(p.sequences.max_seqlen_q, plan.tile.queries) *
                           sm80::num_slices(p.head_dim_v, plan.tile.columns);
    plan.workspace.nan_flags = append(plan.workspace.bytes, blocks * plan.tile.warps);
  }
  return plan;
}

}  // namespace flash_attn_ext::plan
