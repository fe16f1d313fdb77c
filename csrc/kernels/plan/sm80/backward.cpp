// Plans the portable backward pass: the fused kernel, the dK/dV and dQ kernels, or GEMMs of materialised scores.
#include "attention/division.h"
#include "kernels/config/combine.h"
#include "kernels/config/sm80_backward.h"
#include "kernels/plan/mask_tiles.h"
#include "kernels/plan/materialised_scores.h"
#include "kernels/plan/plan.h"
#include "kernels/plan/sm80/sm80.h"
#include "kernels/plan/sm80/split.h"
#include "kernels/schedule/block_diagonals.h"

namespace flash_attn_ext::plan {
namespace {

using attention::BackwardParams;
bool wants_dkdv(const BackwardParams& p) { return p.dk.data != nullptr || p.dv.data != nullptr; }

bool has_scores(const BackwardParams& p) { return p.sequences.max_seqlen_q > 0 && p.sequences.max_seqlen_k > 0; }

bool only_scales(const BackwardParams& p) {
  return score_kind(p.score_mod) == ScoreKind::kScale && !p.dropout.enabled();
}

// The least KV groups that fill a GPU where heads are grouped: about a GPU's SMs.
constexpr int64_t kFusedPairs = 128;

// Whether the fused kernel runs. Its CTA has all keys of a head, and loops over all query heads of a KV group, so there
// must be enough KV groups to fill a GPU. Without keys there would be no CTAs, and dQ would not be written.
bool takes_fused_kernel(const BackwardParams& p) {
  const attention::SequenceTable& lengths = p.sequences;
  const bool fills_gpu = p.queries_per_key_head() == 1 || p.batch * p.num_heads_k >= kFusedPairs;
  return attention::is_16_bit(p.element) && p.dq.data != nullptr && wants_dkdv(p) && fills_gpu && only_scales(p) &&
         largest_head_dim(p) <= sm80::kFusedHeadDim && lengths.max_seqlen_q <= sm80::kFusedQueries &&
         lengths.max_seqlen_k <= sm80::kFusedKeys && lengths.max_seqlen_k > 0;
}

const sm80::DqConfig& dq_config(const BackwardParams& p, ScoreMode score) {
  return sm80::kDqConfigs[sm80::find_row(sm80::kDqConfigs, element_bytes(p), largest_head_dim(p), score)];
}

// Of kernels that sum recomputed dS.
const sm80::DqConfig& dscore_config(const BackwardParams& p) {
  return sm80::kDqConfigs[sm80::dscore_sums_row(element_bytes(p), largest_head_dim(p))];
}

// Whether query tiles leave SMs without a CTA of dQ, and there are keys to split. As in the forward pass, keys are not
// split for more queries, so that a result does not depend on the rest of the batch there.
bool splits_keys_of_dq(const BackwardParams& p, const Limits& limits) {
  const attention::SequenceTable& lengths = p.sequences;
  if (p.dq.data == nullptr || !has_scores(p) || lengths.max_seqlen_q > kSplitQueries) return false;
  const int64_t blocks = p.batch * p.num_heads_q * attention::ceil_div(lengths.max_seqlen_q, kSplitTileQueries);
  return blocks <= limits.sms && visible_keys(p) >= 2 * kSplitKeys && dq_config(p, ScoreMode::kGeneric).split_kv;
}

// split_kv: whether the keys of dQ are split. With that many keys, scale-only kernels pay where their tiles are no
// larger than those of generic kernels.
ScoreMode mode_without_bias_mask(const BackwardParams& p, bool split_kv) {
  const bool has_small_tiles = attention::is_16_bit(p.element) && largest_head_dim(p) > 64;
  const bool fills_tiles = p.sequences.max_seqlen_q > kQueriesOfSmallTiles || (split_kv && has_small_tiles);
  return only_scales(p) && fills_tiles ? ScoreMode::kScaleOnly : ScoreMode::kGeneric;
}

// The score mode that a call needs: that of a bias and a mask only if its kernel can split keys where this is wanted.
ScoreMode score_mode(const BackwardParams& p, bool split_kv) {
  const bool bias_mask = score_kind(p.score_mod) == ScoreKind::kBiasMask && !p.dropout.enabled();
  const bool can_split = dq_config(p, ScoreMode::kBiasMask).split_kv;
  return bias_mask && (!split_kv || can_split) ? ScoreMode::kBiasMask : mode_without_bias_mask(p, split_kv);
}

// Which kernel materialises scores for the other one. In scale-only calls dK/dV does where both of its accumulators fit
// registers, and dQ above that. At head dims up to 64 neither does, because writing and reading scores takes longer
// than the 16-bit GEMMs that compute them again. What changes a score costs dK/dV more, because its rows are not those
// of biases, masks and draws. So where more than a scale changes 16-bit scores, these are computed once: by dQ, or, at
// head dims up to 64 where dQ has no kernel for a bias and a mask, by dK/dV.
bool dkdv_stores_scores(const BackwardParams& p, ScoreMode score) {
  const int64_t head_dim = largest_head_dim(p);
  if (!attention::is_16_bit(p.element)) return head_dim <= 128;
  if (score == ScoreMode::kScaleOnly) return head_dim > 64 && head_dim <= 128;
  return score == ScoreMode::kGeneric && head_dim <= 64;
}
bool dq_stores_scores(const BackwardParams& p, ScoreMode score) {
  const int beyond = score == ScoreMode::kScaleOnly ? 128 : score == ScoreMode::kGeneric ? 64 : 0;
  return attention::is_16_bit(p.element) && largest_head_dim(p) > beyond && largest_head_dim(p) <= 256;
}

bool takes_tf32_kernels(const BackwardParams& p) {
  return p.element == attention::ElementType::kFloat32 && p.allow_tf32 &&
         mode_without_bias_mask(p, /*split_kv=*/false) == ScoreMode::kScaleOnly &&
         largest_head_dim(p) <= sm80::kLargestTf32HeadDim;
}

// Which kernel materialises scores, as far as there is memory for them. dQ, and dK or dV, must be requested.
BackwardKernels choose_order(const BackwardParams& p, ScoreMode score) {
  // Single TF32 GEMMs take less time than reading dS. The three of a float32 GEMM take more.
  if (takes_tf32_kernels(p) || !wants_dkdv(p) || p.dq.data == nullptr || !has_scores(p)) {
    return BackwardKernels::kRecompute;
  }
  if (dkdv_stores_scores(p, score)) return BackwardKernels::kMaterialiseInDkdv;
  if (dq_stores_scores(p, score)) return BackwardKernels::kMaterialiseInDq;
  return BackwardKernels::kRecompute;
}

// Empty where not even the scores of one head fit.
BackwardPlan::Materialised size_materialised_scores(const BackwardParams& p, BackwardKernels order, int64_t max_bytes) {
  const bool keys_first = order == BackwardKernels::kMaterialiseInDkdv;
  const bool packed = is_packed(p);
  const attention::SequenceTable& lengths = p.sequences;
  BackwardPlan::Materialised materialised;
  materialised.columns = MaterialisedScores::padded(keys_first ? lengths.max_seqlen_q : lengths.max_seqlen_k);
  materialised.rows = packed ? MaterialisedScores::packed_rows(keys_first ? lengths.total_k : lengths.total_q, p.batch)
                             : MaterialisedScores::padded(keys_first ? lengths.max_seqlen_k : lengths.max_seqlen_q);
  // A matrix holds one pair or, in a packed batch, all pairs of a key head.
  const int64_t pairs_of_matrix = packed ? p.batch : 1;
  const int64_t matrices = p.batch * p.num_heads_k / pairs_of_matrix;
  const int64_t bytes = p.queries_per_key_head() * materialised.rows * materialised.columns * element_bytes(p);
  const int64_t most =
      std::min(std::min(max_bytes, MaterialisedScores::kMostBytes) / (keys_first ? bytes : 2 * bytes), matrices);
  if (most == 0) return {};
  materialised.pairs_per_launch = in_equal_launches(p, most * pairs_of_matrix);
  materialised.bytes_of_matrices = materialised.pairs_per_launch / pairs_of_matrix * bytes;
  materialised.launches = attention::ceil_div(p.batch * p.num_heads_k, materialised.pairs_per_launch);
  return materialised;
}

// Makes room for the flags of the tiles of what hides keys.
void append_mask_tiles(BackwardPlan& plan, const BackwardParams& p) {
  if (!p.score_mod.hides_keys() || plan.workspace.mask_tiles.present()) return;
  plan.workspace.mask_tiles = append(plan.workspace.bytes, mask_tiles_bytes(p));
}

// In sums of dS over queries the terms cancel, but the error that a rounded O leaves in delta does not. Nor does it
// vanish in the gradient of a bias that is more precise than O.
bool needs_exact_delta(const BackwardParams& p) {
  return attention::is_16_bit(p.element) && (dbias_is_column_sums(p) || has_precise_dbias(p));
}

DeltaSource choose_delta(const BackwardParams& p, BackwardKernels kernels) {
  if (needs_exact_delta(p)) return DeltaSource::kExactKernel;
  if (dbias_is_row_sums(p)) return DeltaSource::kOwnKernel;  // the row sums come between it and all that read delta
  const bool dq_kernel_has_queries = kernels == BackwardKernels::kFused || kernels == BackwardKernels::kRecompute ||
                                     kernels == BackwardKernels::kMaterialiseInDq;
  const int64_t chunk = 16 / element_bytes(p);
  const bool readable = has_whole_chunks(p.out, p.head_dim_v, chunk) && has_whole_chunks(p.dout, p.head_dim_v, chunk);
  return dq_kernel_has_queries && p.dq.data != nullptr && readable ? DeltaSource::kSharedKernel
                                                                   : DeltaSource::kOwnKernel;
}

void plan_dbias(BackwardPlan& plan, const BackwardParams& p) {
  if (!p.dbias.present()) return;
  if (dbias_is_row_sums(p)) {
    plan.dbias = BiasGradientSource::kRowSums;
    plan.writes_dbias_once = true;
    return;
  }
  if (p.score_mod.bias.is_relative()) return;  // planned with the workspace
  if (plan.materialised.launches == 0 || !dbias_may_read_materialised(p)) {
    plan_recomputed_dbias(plan, p);
    return;
  }
  plan.dbias = BiasGradientSource::kMaterialised;
  plan.writes_dbias_once = launches_hold_sums_of_dbias(p, plan.materialised.pairs_per_launch);
}

// The least keys that are worth a CTA that computes a partial dQ, and the CTAs of the dQ kernel per SM.
constexpr int64_t kLeastKeysOfDqSplit = 256;
constexpr int kDqCtas = 2;

// The kernel that computes dQ: the queries of a tile, and its CTAs per SM.
struct DqBlocks {
  int queries;
  int ctas_per_sm;
};

DqBlocks dq_blocks(const BackwardPlan& plan, const BackwardParams& p) {
  if (plan.kernels == BackwardKernels::kMaterialiseInDkdv) {
    const sm80::GemmTile tile = sm80::gemm_tile(element_bytes(p), static_cast<int>(p.head_dim_qk));
    return {tile.rows, tile.ctas_per_sm};
  }
  return {sm80::kDqConfigs[plan.dq_row].tile.queries, kDqCtas};
}

// As many splits as let all CTAs run at once, each with enough keys.
int64_t count_dq_splits(const BackwardPlan& plan, const BackwardParams& p, const Limits& limits) {
  const DqBlocks of_dq = dq_blocks(plan, p);
  const int64_t blocks = p.batch * p.num_heads_q * attention::ceil_div(p.sequences.max_seqlen_q, of_dq.queries);
  return std::clamp<int64_t>(limits.sms * of_dq.ctas_per_sm / blocks, 1, visible_keys(p) / kLeastKeysOfDqSplit);
}

void plan_kernels(BackwardPlan& plan, const BackwardParams& p, const Limits& limits) {
  plan.dscore_head_dim = dscore_config(p).head_dim;
  if (takes_fused_kernel(p)) {
    plan.kernels = BackwardKernels::kFused;
    plan.dq_score = plan.dkdv_score = ScoreMode::kScaleOnly;
    while (sm80::kFusedConfigs[plan.fused_row].keys < p.sequences.max_seqlen_k) ++plan.fused_row;
    plan.nan_repair = NanRepair::kInKernel;
    return;
  }
  const bool split_kv = splits_keys_of_dq(p, limits);
  plan.kernels = choose_order(p, score_mode(p, split_kv));
  if (plan.kernels != BackwardKernels::kRecompute) {
    plan.materialised = size_materialised_scores(p, plan.kernels, limits.max_materialised_bytes);
    if (plan.materialised.launches == 0) plan.kernels = BackwardKernels::kRecompute;
  }
  const auto row_of = [&](const auto& table, ScoreMode score) {
    return sm80::find_row(table, element_bytes(p), largest_head_dim(p), score);
  };
  plan.dq_row = row_of(sm80::kDqConfigs, score_mode(p, split_kv));
  plan.dkdv_row = row_of(sm80::kDkdvConfigs, mode_without_bias_mask(p, split_kv));
  plan.dq_score = sm80::kDqConfigs[plan.dq_row].score;
  plan.dq_head_dim = sm80::kDqConfigs[plan.dq_row].head_dim;
  plan.dkdv_score = sm80::kDkdvConfigs[plan.dkdv_row].score;
  plan.dkdv_head_dim = sm80::kDkdvConfigs[plan.dkdv_row].head_dim;
  plan.tf32 = takes_tf32_kernels(p);
  plan.nan_repair = NanRepair::kOwnLaunch;
  if (split_kv) plan.dq_splits = count_dq_splits(plan, p, limits);
}

int64_t count_blocks(const BackwardParams& p, int64_t heads, int64_t length, int tile_rows) {
  return p.batch * heads * attention::ceil_div(length, tile_rows);
}

void plan_workspace(BackwardPlan& plan, const BackwardParams& p, const Limits& limits) {
  int64_t& total = plan.workspace.bytes;
  plan.workspace.delta = append(total, statistic_bytes(p));
  const bool stores_p = plan.kernels == BackwardKernels::kMaterialiseInDq;
  plan.workspace.materialised_scores = append(total, plan.materialised.bytes_of_matrices * (stores_p ? 2 : 1));
  append_mask_tiles(plan, p);
  if (p.dalibi_slopes) plan_dalibi(plan, p);
  if (plan.dq_splits > 1) {
    const int64_t rows = statistic_bytes(p) / int64_t{sizeof(float)};
    const int64_t row_bytes = common::dq_partial_columns(p.head_dim_qk) * int64_t{sizeof(float)};
    plan.workspace.dq_partials = append(total, plan.dq_splits * rows * row_bytes);
  }
  if (p.dbias.present() && p.score_mod.bias.is_relative()) plan_relative_dbias(plan, p, limits);
  if (plan.nan_repair != NanRepair::kOwnLaunch) return;
  // The kernel that sums partial dQ recomputes rows itself.
  if (p.dq.data != nullptr && plan.kernels != BackwardKernels::kMaterialiseInDkdv && plan.dq_splits == 1) {
    const TileShape tile = sm80::kDqConfigs[plan.dq_row].tile;
    const int64_t blocks = count_blocks(p, p.num_heads_q, p.sequences.max_seqlen_q, tile.queries);
    plan.workspace.dq_nan_flags = append(total, blocks * num_slices(p.head_dim_qk, tile.columns) * tile.warps);
  }
  if (wants_dkdv(p) && plan.kernels != BackwardKernels::kMaterialiseInDq) {
    const sm80::KeyStationaryTile tile = sm80::kDkdvConfigs[plan.dkdv_row].tile;
    const int64_t blocks = count_blocks(p, p.num_heads_k, p.sequences.max_seqlen_k, tile.keys);
    plan.workspace.dkdv_nan_flags = append(total, blocks * num_slices(largest_head_dim(p), tile.columns) * tile.warps);
  }
}

BackwardPlan plan_rows(const BackwardParams& p) {
  BackwardPlan plan;
  plan.kernels = BackwardKernels::kRows;
  plan.delta = DeltaSource::kOwnKernel;
  if (p.dbias.present()) {
    const bool is_relative = p.score_mod.bias.is_relative();
    plan.dbias = is_relative            ? BiasGradientSource::kRelative
                 : dbias_is_row_sums(p) ? BiasGradientSource::kRowSums
                                        : BiasGradientSource::kRecomputed;
  }
  plan.workspace.delta = append(plan.workspace.bytes, statistic_bytes(p));
  if (p.dalibi_slopes) {
    plan.alibi_partials_per_head = p.sequences.max_seqlen_q;
    plan.workspace.alibi_partials =
        append(plan.workspace.bytes, p.batch * p.num_heads_q * plan.alibi_partials_per_head * int64_t{sizeof(double)});
  }
  return plan;
}

}  // namespace

void plan_dalibi(BackwardPlan& plan, const BackwardParams& p) {
  append_mask_tiles(plan, p);
  const sm80::DqConfig& config = dscore_config(p);
  // The kernel of the exact delta also sums the slopes' gradient. If it runs before dQ, dK and dV, it need not run
  // again, unless dBias is row sums, for which its delta lacks dlse.
  plan.exact_delta_of_sums = plan.delta != DeltaSource::kExactKernel || plan.dbias == BiasGradientSource::kRowSums;
  plan.dscore_head_dim = config.head_dim;
  plan.alibi_partials_per_head = attention::ceil_div(p.sequences.max_seqlen_q, config.tile.queries);
  plan.workspace.alibi_partials =
      append(plan.workspace.bytes, p.batch * p.num_heads_q * plan.alibi_partials_per_head * int64_t{sizeof(float)});
}

void plan_recomputed_dbias(BackwardPlan& plan, const BackwardParams& p) {
  append_mask_tiles(plan, p);
  plan.dbias = BiasGradientSource::kRecomputed;
  plan.dscore_head_dim = dscore_config(p).head_dim;
  plan.writes_dbias_once = has_scores(p);  // without scores there are no CTAs that would write it
}

void plan_relative_dbias(BackwardPlan& plan, const BackwardParams& p, const Limits& limits) {
  const sm80::DqConfig& config = dscore_config(p);
  plan.dbias = BiasGradientSource::kRelative;
  plan.dscore_head_dim = config.head_dim;
  plan.writes_dbias_once = has_scores(p);
  if (!has_scores(p)) return;
  divide_relative_dbias(plan, p, config.tile.queries, limits.sms * kDqCtas);  // the tiles are those of the dQ kernel
}

void divide_relative_dbias(BackwardPlan& plan, const BackwardParams& p, int tile, int64_t ctas) {
  const int64_t ctas_of_split = BlockDiagonals::of(p, tile, 1).num_ctas();
  plan.dbias_splits = count_dbias_splits(p, ctas, ctas_of_split);
  plan.workspace.dbias_partials = append(plan.workspace.bytes, BlockDiagonals::of(p, tile, plan.dbias_splits).bytes());
}

BackwardPlan plan_backward_sm80(const BackwardParams& p, const Limits& limits) {
  if (p.element == attention::ElementType::kFloat64) return plan_rows(p);
  if (takes_bias_stationary(p)) return plan_backward_bias_stationary(p, limits);
  BackwardPlan plan;
  plan.l2_bytes = limits.l2_bytes;
  plan_kernels(plan, p, limits);
  plan.delta = choose_delta(p, plan.kernels);
  plan_dbias(plan, p);
  plan_workspace(plan, p, limits);
  return plan;
}

}  // namespace flash_attn_ext::plan
