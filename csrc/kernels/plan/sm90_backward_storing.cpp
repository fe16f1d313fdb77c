#include "kernels/plan/mask_tiles.h"
#include "kernels/plan/score_tiles.h"
#include "kernels/plan/sm80.h"
#include "kernels/plan/sm90.h"
#include "kernels/plan/workspace.h"
#include "kernels/tile_config_storing.h"

namespace flash_attn_ext::plan {
namespace {

using attention::BackwardParams;

// Tiles of queries of a head, in all sequences. A packed sequence begins at a tile of its own.
int64_t count_query_tiles(const BackwardParams& p) {
  return ScoreTiles::rows_of_matrix(p) * (is_packed(p) ? 1 : p.batch);
}

// No launches where not even one key head's scores fit.
BackwardPlan::Stored size_stored_tiles(const BackwardParams& p, int64_t max_bytes) {
  BackwardPlan::Stored stored;
  // A matrix holds one pair, or all pairs of a key head.
  const int64_t pairs_of_matrix = is_packed(p) ? p.batch : 1;
  const int64_t num_pairs = p.batch * p.num_heads_k;
  const int64_t bytes = p.queries_per_key_head() * ScoreTiles::of(p).in_matrix * ScoreTiles::kBytes;
  const int64_t most = std::min(max_bytes / (2 * bytes), num_pairs / pairs_of_matrix);
  if (most == 0) return {};
  stored.pairs_per_launch = in_equal_launches(p, most * pairs_of_matrix);
  stored.bytes_of_matrices = stored.pairs_per_launch / pairs_of_matrix * bytes;
  stored.launches = (num_pairs + stored.pairs_per_launch - 1) / stored.pairs_per_launch;
  return stored;
}

}  // namespace

std::optional<BackwardPlan> plan_backward_sm90_storing(const BackwardParams& p, const Limits& limits) {
  const sm90::HeadDims dims = sm90::storing_head_dims(p.head_dim_qk, p.head_dim_v);
  const Variant wanted = wanted_variant_sm90(p);
  const Variant variant =
      wanted == Variant::kPlain || sm90::has_storing_kernel(dims, wanted) ? wanted : Variant::kExtended;
  if (!sm90::has_storing_kernel(dims, variant)) return std::nullopt;
  BackwardPlan plan;
  plan.query_tiles_of_head = count_query_tiles(p);
  plan.stored = size_stored_tiles(p, limits.max_stored_bytes);
  if (plan.stored.launches == 0) return std::nullopt;
  plan.kernels = BackwardKernels::kWarpSpecialisedStoring;
  plan.delta = DeltaSource::kFirstKernel;
  plan.dq_head_dim = plan.dkdv_head_dim = dims.qk;
  plan.head_dim_v = dims.v;
  plan.dq_variant = plan.dkdv_variant = variant;
  if (p.dbias.present()) {
    plan.dbias = BiasGradientSource::kStored;
    plan.writes_dbias_once = launches_hold_sums_of_dbias(p, plan.stored.pairs_per_launch);
  }
  plan.nan_repair = NanRepair::kOwnLaunch;
  plan.l2_bytes = limits.l2_bytes;
  plan.resident_blocks = limits.multiprocessors;
  const auto tiles_of = [](int64_t rows, int64_t tile_rows) { return (rows + tile_rows - 1) / tile_rows; };
  const int64_t query_flags = 4 * tiles_of(p.sequences.max_seqlen_q, ScoreTiles::kRows);
  const sm90::ProductTile product = sm90::product_tile(dims);
  const int64_t key_flags = product.flags() * tiles_of(p.sequences.max_seqlen_k, product.keys());
  constexpr int64_t kCounters = 2;  // of each launch: tiles of queries, then of keys
  BackwardPlan::Workspace& parts = plan.workspace;
  parts.delta = append(parts.bytes, statistic_bytes(p));
  parts.stored_scores = append(parts.bytes, 2 * plan.stored.bytes_of_matrices);
  parts.statistics = append(parts.bytes, p.num_heads_q * plan.query_tiles_of_head * ScoreTiles::kRows *
                                             ScoreTiles::kStatistics * int64_t{sizeof(float)});
  if (p.score_mod.mask.present()) {
    parts.mask_tiles = append(parts.bytes, count_mask_tiles(p).total());
    if (variant != Variant::kExtended) parts.mask_bits = append(parts.bytes, mask_bits_bytes(p));
  }
  parts.claims = append(parts.bytes, plan.stored.launches * kCounters * int64_t{sizeof(uint32_t)});
  parts.dq_nan_flags = append(parts.bytes, p.batch * p.num_heads_q * query_flags);
  parts.dkdv_nan_flags = append(parts.bytes, p.batch * p.num_heads_k * key_flags);
  return plan;
}

}  // namespace flash_attn_ext::plan
