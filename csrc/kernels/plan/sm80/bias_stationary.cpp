// Plans the bias-stationary kernels of both passes, for many short sequences.
#include "kernels/config/bias_stationary.h"

#include <algorithm>
#include <iterator>

#include "kernels/plan/mask_tiles.h"
#include "kernels/plan/plan.h"
#include "kernels/plan/sm80/sm80.h"

namespace flash_attn_ext::plan {
namespace {

using attention::BackwardParams;
using attention::ForwardParams;

constexpr int64_t kMostHeadDim = std::end(sm80::kBiasStationaryConfigs)[-1].head_dim;

// Where scores are only scaled, other kernels are faster at head dims 33 to 64, and in the forward pass above 128
// (docs/kernels/log/sm80_forward.md, "Bias-stationary kernels without a bias").
constexpr int64_t kMostNarrowHeadDim = 32;
constexpr int64_t kLeastWideHeadDim = 65;
constexpr int64_t kMostScaledHeadDimForward = 128;

int row_of(const attention::AttentionParams& p) {
  int row = 0;
  while (sm80::kBiasStationaryConfigs[row].head_dim < largest_head_dim(p)) ++row;
  return row;
}

// As many CTAs as run at once on Hopper, each of which has a share of the batch entries of one head.
int64_t count_ctas(const attention::AttentionParams& p, int ctas_per_sm, const Limits& limits) {
  const int64_t parts = ctas_per_sm * limits.sms / p.num_heads_q;
  return std::min(std::max<int64_t>(parts, 1), p.batch) * p.num_heads_q;
}

// One flag for each warp of a sequence's tile.
int64_t nan_flag_bytes(const attention::AttentionParams& p, const sm80::BiasStationaryConfig& config) {
  return p.batch * p.num_heads_q * config.tile.warps;
}

bool suits_scores(const attention::AttentionParams& p, int64_t most_scaled_head_dim) {
  const int64_t head_dim = largest_head_dim(p);
  switch (score_kind(p.score_mod)) {
    case ScoreKind::kBiasMask:
      return head_dim <= kMostHeadDim;
    case ScoreKind::kScale:
      return head_dim <= kMostNarrowHeadDim || (head_dim >= kLeastWideHeadDim && head_dim <= most_scaled_head_dim);
    default:
      return false;
  }
}

bool has_short_sequences(const attention::AttentionParams& p) {
  constexpr int64_t kTokens = sm80::kBiasStationaryTokens;
  const attention::SequenceTable& lengths = p.sequences;
  return attention::is_16_bit(p.element) && !p.dropout.enabled() && !p.score_mod.selects_keys() && !is_packed(p) &&
         !p.cache.present() && has_short_strides(kTokens, {&p.q, &p.k, &p.v}) && lengths.max_seqlen_q <= kTokens &&
         lengths.max_seqlen_k <= kTokens && lengths.max_seqlen_k > 0;
}

bool writes_dbias(const BackwardParams& p) {
  const attention::BiasGradient& dbias = p.dbias;
  return !dbias.present() ||
         (dbias.per_query && dbias.per_key && (dbias.per_head || !dbias.per_batch) && !p.score_mod.bias.is_relative());
}

}  // namespace

bool takes_bias_stationary(const ForwardParams& p) {
  return has_short_sequences(p) && suits_scores(p, kMostScaledHeadDimForward);
}

bool takes_bias_stationary(const BackwardParams& p) {
  return has_short_sequences(p) && suits_scores(p, kMostHeadDim) && p.queries_per_key_head() == 1 &&
         p.dalibi_slopes == nullptr && writes_dbias(p) &&
         has_short_strides(sm80::kBiasStationaryTokens, {&p.out, &p.dout}) && has_whole_chunks(p);
}

ForwardPlan plan_forward_bias_stationary(const ForwardParams& p, const Limits& limits) {
  ForwardPlan plan;
  plan.row_max = p.row_max.present();
  plan.kernel = ForwardKernel::kBiasStationary;
  plan.row = row_of(p);
  const sm80::BiasStationaryConfig& config = sm80::kBiasStationaryConfigs[plan.row];
  plan.score = config.score;
  plan.head_dim = config.head_dim;
  plan.tile = config.tile;
  plan.nan_repair = NanRepair::kInKernel;
  plan.persistent_ctas = count_ctas(p, config.tile.ctas_per_sm, limits);
  if (p.score_mod.mask.present()) plan.workspace.mask_bits = append(plan.workspace.bytes, mask_bits_bytes(p));
  plan.workspace.nan_flags = append(plan.workspace.bytes, nan_flag_bytes(p, config));
  return plan;
}

BackwardPlan plan_backward_bias_stationary(const BackwardParams& p, const Limits& limits) {
  BackwardPlan plan;
  plan.kernels = BackwardKernels::kBiasStationary;
  plan.row = row_of(p);
  const sm80::BiasStationaryConfig& config = sm80::kBiasStationaryConfigs[plan.row];
  plan.delta = DeltaSource::kSharedKernel;
  plan.dq_score = plan.dkdv_score = config.score;
  plan.dq_head_dim = plan.dkdv_head_dim = config.head_dim;
  plan.nan_repair = NanRepair::kInKernel;
  plan.persistent_ctas = count_ctas(p, config.ctas_per_sm_backward, limits);
  BackwardPlan::Workspace& parts = plan.workspace;
  parts.delta = append(parts.bytes, statistic_bytes(p));
  if (p.score_mod.mask.present()) parts.mask_bits = append(parts.bytes, mask_bits_bytes(p));
  parts.dq_nan_flags = append(parts.bytes, nan_flag_bytes(p, config));
  if (!p.dbias.present()) return plan;
  plan.dbias = BiasGradientSource::kSameDscores;
  plan.writes_dbias_once = true;
  if (!p.dbias.per_batch) {
    const int64_t scores = config.tile.queries * config.tile.keys;
    parts.dbias_partials = append(parts.bytes, plan.persistent_ctas * scores * int64_t{sizeof(float)});
  }
  return plan;
}

}  // namespace flash_attn_ext::plan
