// Plans the kernels of short heads with a bias, and those of the gradient of a bias that all batch entries share. They
// are for Hopper.
#include "kernels/config/short_bias.h"

#include <algorithm>

#include "kernels/config/bias_stationary.h"
#include "kernels/config/dbias_over_batch.h"
#include "kernels/plan/plan.h"
#include "kernels/plan/sm80/sm80.h"
#include "kernels/plan/sm90/sm90.h"

namespace flash_attn_ext::plan {
namespace {

using attention::BackwardParams;

// With fewer keys, at least half of a backward CTA's warps would have none.
constexpr int64_t kLeastShortBiasKeys = 129;

// CTAs for each SM in the kernel of a relative-position bias. One CTA fits an SM at a time, so more of them let short
// block diagonals fill the SMs that have finished long ones. Other numbers have not been timed.
constexpr int64_t kRelativeDbiasCtas = 4;

// With dropout, the gradient of a bias of more queries is faster to sum from materialised dS.
constexpr int64_t kMostDroppingQueries = 1024;

// Whether a bias with a value for each query and key changes the scores, and beside it at most a mask that hides the
// same keys from all queries.
bool has_bias_and_key_mask(const attention::AttentionParams& p) {
  const attention::ScoreMod& mod = p.score_mod;
  return attention::is_16_bit(p.element) && score_kind(mod) == ScoreKind::kBiasMask && mod.bias.present() &&
         has_bias_boxes(mod.bias) && mod.mask.query_stride == 0 && !mod.selects_keys() && !is_packed(p) &&
         !p.cache.present() && p.head_dim_qk > 0 && p.head_dim_v > 0;
}

// One flag for each warp of a head.
int64_t nan_flag_bytes(const attention::AttentionParams& p) {
  return p.batch * p.num_heads_q * sm80::kShortBiasForward.tile.warps;
}

// Whether a call has short heads with a bias, longer than what bias-stationary kernels take.
bool has_short_heads(const attention::AttentionParams& p) {
  const attention::SequenceTable& lengths = p.sequences;
  return has_bias_and_key_mask(p) && !p.dropout.enabled() && !p.score_mod.bias.is_relative() &&
         p.visibility.unlimited() && largest_head_dim(p) <= sm80::kShortBiasHeadDim &&
         lengths.max_seqlen_q > sm80::kBiasStationaryTokens && lengths.max_seqlen_q <= sm80::kShortBiasTokens &&
         lengths.max_seqlen_k >= kLeastShortBiasKeys && lengths.max_seqlen_k <= sm80::kShortBiasTokens &&
         has_short_strides(sm80::kShortBiasTokens, {&p.q, &p.k, &p.v});
}

// Whether the kernels that recompute tiles of dS for a bias take a call.
bool recomputes_by_tiles(const BackwardParams& p) {
  return has_bias_and_key_mask(p) && largest_head_dim(p) <= sm80::kLargestDbiasHeadDim &&
         has_short_strides(sm80::kDbiasTile, {&p.q, &p.k, &p.v, &p.dout});
}

}  // namespace

bool takes_short_bias(const attention::ForwardParams& p) { return has_short_heads(p) && !p.row_max.present(); }

bool takes_short_bias(const BackwardParams& p) {
  return has_short_heads(p) && p.queries_per_key_head() == 1 && (!p.dbias.present() || takes_dbias_over_batch(p)) &&
         has_whole_chunks(p);
}

ForwardPlan plan_forward_short_bias(const attention::ForwardParams& p) {
  ForwardPlan plan;
  plan.kernel = ForwardKernel::kShortBias;
  plan.score = sm80::kShortBiasForward.score;
  plan.head_dim = sm80::kShortBiasForward.head_dim;
  plan.tile = sm80::kShortBiasForward.tile;
  plan.nan_repair = NanRepair::kOwnLaunch;
  plan.workspace.nan_flags = append(plan.workspace.bytes, nan_flag_bytes(p));
  return plan;
}

BackwardPlan plan_backward_short_bias(const BackwardParams& p, const Limits& limits) {
  BackwardPlan plan;
  plan.kernels = BackwardKernels::kShortBias;
  plan.delta = DeltaSource::kSharedKernel;
  plan.dq_score = plan.dkdv_score = ScoreMode::kBiasMask;
  plan.dq_head_dim = plan.dkdv_head_dim = sm80::kShortBiasHeadDim;
  plan.nan_repair = NanRepair::kOwnLaunch;
  plan.workspace.delta = append(plan.workspace.bytes, statistic_bytes(p));
  plan.workspace.dq_nan_flags = append(plan.workspace.bytes, nan_flag_bytes(p));
  if (p.dbias.present()) plan_dbias_over_batch(plan, p, limits);
  return plan;
}

bool takes_dbias_over_batch(const BackwardParams& p) {
  const attention::BiasGradient& dbias = p.dbias;
  const bool is_long = p.dropout.enabled() && p.sequences.max_seqlen_q > kMostDroppingQueries;
  return dbias.present() && dbias.per_query && dbias.per_key && !dbias.per_batch && !p.score_mod.bias.is_relative() &&
         !is_long && recomputes_by_tiles(p);
}

bool takes_relative_dbias_over_batch(const BackwardParams& p) {
  return p.dbias.present() && p.score_mod.bias.is_relative() && recomputes_by_tiles(p);
}

void plan_dbias_over_batch(BackwardPlan& plan, const BackwardParams& p, const Limits& limits) {
  const int64_t tiles = (p.dbias.per_head ? p.num_heads_q : 1) * sm80::dbias_tiles(p.sequences.max_seqlen_q) *
                        sm80::dbias_tiles(p.sequences.max_seqlen_k);
  plan.dbias = BiasGradientSource::kOverBatch;
  plan.writes_dbias_once = true;
  plan.dscore_head_dim = sm80::dbias_head_dim(largest_head_dim(p));
  plan.dbias_splits = count_dbias_splits(p, limits.sms, tiles);
  if (plan.dbias_splits == 1) return;
  plan.workspace.dbias_partials = append(plan.workspace.bytes, plan.dbias_splits * tiles * sm80::kDbiasPartialBytes);
}

void plan_relative_dbias_over_batch(BackwardPlan& plan, const BackwardParams& p, const Limits& limits) {
  plan.dbias = BiasGradientSource::kRelativeOverBatch;
  plan.writes_dbias_once = true;
  plan.dscore_head_dim = sm80::dbias_head_dim(largest_head_dim(p));
  divide_relative_dbias(plan, p, sm80::kDbiasTile, limits.sms * kRelativeDbiasCtas);
}

}  // namespace flash_attn_ext::plan
