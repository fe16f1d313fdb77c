// Plans the portable forward pass, and forward mode.
#include <iterator>

#include "attention/division.h"
#include "kernels/config/sm80_forward.h"
#include "kernels/plan/mask_tiles.h"
#include "kernels/plan/plan.h"
#include "kernels/plan/sm80/sm80.h"
#include "kernels/plan/sm80/split.h"
#include "tile/sm80/strides.h"

namespace flash_attn_ext::plan {
namespace {

// Up to this number of queries the kernel for few queries is faster.
constexpr int64_t kFewQueries = 64;
constexpr int64_t kFewCausalQueries = 448;  // causality hides more of larger tiles

// From this number of keys on, the whole-heads kernel is faster. With fewer, a narrow last tile of the other kernel is.
constexpr int64_t kLeastKeysOfWholeHeads = 81;

// Within a tile, the bytes between rows are 32-bit numbers.
bool has_short_strides(const attention::AttentionParams& p) {
  return std::max({p.q.row_stride, p.k.row_stride, p.v.row_stride}) < tile::kLongStride;
}

// Whether the whole-heads kernel runs. It needs all keys of a head at once, and fewer queries would leave rows empty.
bool takes_whole_heads(const attention::ForwardParams& p) {
  const attention::SequenceTable& lengths = p.sequences;
  return attention::is_16_bit(p.element) && score_kind(p.score_mod) == ScoreKind::kScale && !p.dropout.enabled() &&
         p.visibility.unlimited() && !is_packed(p) && p.head_dim_qk == sm80::kHeadsHeadDim &&
         p.head_dim_v == sm80::kHeadsHeadDim && has_short_strides(p) && lengths.max_seqlen_q > kFewQueries &&
         lengths.max_seqlen_q <= sm80::kHeadsRows && lengths.max_seqlen_k >= kLeastKeysOfWholeHeads &&
         lengths.max_seqlen_k <= sm80::kHeadsRows;
}

// What the scores of a call need.
ScoreMode score_mode(const attention::ForwardParams& p) {
  switch (score_kind(p.score_mod)) {
    case ScoreKind::kScale:
      return p.dropout.enabled() ? ScoreMode::kDropout : ScoreMode::kScaleOnly;
    case ScoreKind::kBiasMask:
      return p.dropout.enabled() ? ScoreMode::kGeneric : ScoreMode::kBiasMask;
    default:
      return ScoreMode::kGeneric;
  }
}

// Whether each row for few queries comes after the default one of its head dim, as choose_row expects.
constexpr bool rows_for_few_queries_come_second() {
  for (int row = 0; row < static_cast<int>(std::size(sm80::kForwardConfigs)); ++row) {
    const sm80::ForwardConfig& config = sm80::kForwardConfigs[row];
    const int first = sm80::find_row(sm80::kForwardConfigs, config.element_bytes, config.head_dim, config.score);
    if (config.for_few_queries && row != first + 1) return false;
  }
  return true;
}
static_assert(rows_for_few_queries_come_second());

int choose_row(const attention::ForwardParams& p) {
  const auto row_of = [&](ScoreMode score) {
    return sm80::find_row(sm80::kForwardConfigs, element_bytes(p), largest_head_dim(p), score);
  };
  const ScoreMode score = score_mode(p);
  const int row = row_of(score);
  if (score != ScoreMode::kScaleOnly && score != ScoreMode::kBiasMask) return row;
  const int64_t queries = p.sequences.max_seqlen_q;
  const bool is_causal = score == ScoreMode::kScaleOnly && p.visibility.one_sided();
  // The row after that of the same head dim is for few queries, where there is one.
  if (sm80::kForwardConfigs[row + 1].for_few_queries) {
    return queries <= (is_causal ? kFewCausalQueries : kFewQueries) ? row + 1 : row;
  }
  if (score == ScoreMode::kBiasMask) return row;
  const int generic = row_of(ScoreMode::kGeneric);
  const bool generic_is_smaller = sm80::kForwardConfigs[generic].tile.queries < sm80::kForwardConfigs[row].tile.queries;
  return generic_is_smaller && queries <= kQueriesOfSmallTiles ? generic : row;
}

}  // namespace

ForwardPlan plan_forward_sm80(const attention::ForwardParams& p, const Limits& limits) {
  ForwardPlan plan;
  plan.row_max = p.row_max.present();
  plan.l2_bytes = limits.l2_bytes;
  if (p.element == attention::ElementType::kFloat64) {
    plan.kernel = ForwardKernel::kRows;
    return plan;
  }
  if (takes_bias_stationary(p)) return plan_forward_bias_stationary(p, limits);
  if (is_bound_by_keys(p) || leaves_sms_idle(p, kSplitTileQueries, limits)) {
    return plan_split_forward(p, limits);
  }
  if (takes_whole_heads(p)) {
    plan.kernel = ForwardKernel::kWholeHeads;
    plan.head_dim = sm80::kHeadsHeadDim;
    plan.score = ScoreMode::kScaleOnly;
    plan.nan_repair = NanRepair::kInKernel;
    plan.persistent_ctas = sm80::kWholeHeadCtasPerSm * limits.sms;
    return plan;
  }
  plan.kernel = ForwardKernel::kStreaming;
  plan.row = choose_row(p);
  const sm80::ForwardConfig& config = sm80::kForwardConfigs[plan.row];
  plan.score = config.score;
  plan.head_dim = config.head_dim;
  plan.tf32 = p.allow_tf32 && plan.score == ScoreMode::kScaleOnly && config.element_bytes == 4 &&
              plan.head_dim <= sm80::kLargestTf32HeadDim;
  plan.tile = config.tile;
  plan.nan_repair = config.repairs_in_kernel ? NanRepair::kInKernel : NanRepair::kOwnLaunch;
  if (p.score_mod.hides_keys()) {
    plan.workspace.mask_tiles = append(plan.workspace.bytes, mask_tiles_bytes(p));
  }
  if (plan.nan_repair == NanRepair::kOwnLaunch) {
    const int64_t blocks = p.batch * p.num_heads_q * attention::ceil_div(p.sequences.max_seqlen_q, plan.tile.queries) *
                           num_slices(p.head_dim_v, plan.tile.columns);
    plan.workspace.nan_flags = append(plan.workspace.bytes, blocks * plan.tile.warps);
  }
  return plan;
}

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
