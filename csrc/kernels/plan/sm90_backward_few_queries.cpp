#include <algorithm>

#include "kernels/plan/sm80.h"
#include "kernels/plan/sm90.h"
#include "kernels/plan/workspace.h"
#include "kernels/tile_config_few_queries.h"

namespace flash_attn_ext::plan {
namespace {

using attention::BackwardParams;

constexpr int64_t kFlagRows = 16;  // of a NaN flag
constexpr int64_t kFlagsOfTile = sm90::kFewQueriesKeys / kFlagRows;
constexpr int64_t kMostTiles = INT32_MAX / kFlagsOfTile;  // the kernel numbers flags in 32 bits

int64_t count_tiles(const BackwardParams& p) {
  const int64_t of_a_pair = (p.sequences.max_seqlen_k + sm90::kFewQueriesKeys - 1) / sm90::kFewQueriesKeys;
  return p.batch * p.num_heads_q * of_a_pair;
}

// As many as multiprocessors, or a few less, if each then has tiles of one pair alone. (H200, 16 pairs at head dim 128,
// 132 and 128 blocks: 4k keys 27.2 and 25.0 us, 32k 162 and 157.)
int64_t count_blocks(int64_t pairs, int64_t multiprocessors) {
  const int64_t whole = multiprocessors / pairs * pairs;
  return 20 * whole >= 19 * multiprocessors ? whole : multiprocessors;
}

}  // namespace

bool keeps_queries(const BackwardParams& p) {
  const attention::SequenceTable& lengths = p.sequences;
  if (wanted_variant_sm90(p) != Variant::kPlain || largest_head_dim(p) > sm90::kLargestBackwardHeadDim) return false;
  if (!p.visibility.unlimited() || is_packed(p) || p.num_heads_q != p.num_heads_k) return false;
  if (count_tiles(p) > kMostTiles) return false;
  return lengths.max_seqlen_q <= sm90::kFewQueries &&
         lengths.max_seqlen_k > sm90::kMostKeysPerQuery * lengths.max_seqlen_q;
}

BackwardPlan plan_backward_few_queries(const BackwardParams& p, const Limits& limits) {
  BackwardPlan plan;
  const int64_t pairs = p.batch * p.num_heads_q;
  const int head_dim = largest_head_dim(p) <= 64 ? 64 : 128;
  plan.kernels = BackwardKernels::kWarpSpecialisedFewQueries;
  plan.delta = DeltaSource::kOwnKernel;
  plan.dq_head_dim = plan.dkdv_head_dim = head_dim;
  plan.dq_variant = plan.dkdv_variant = Variant::kPlain;
  plan.nan_repair = NanRepair::kOwnLaunch;
  plan.resident_blocks = std::min(count_tiles(p), count_blocks(pairs, limits.multiprocessors));
  BackwardPlan::Workspace& parts = plan.workspace;
  parts.delta = append(parts.bytes, statistic_bytes(p));
  const int64_t dq_parts = plan.resident_blocks + pairs - 1;  // each one ends a block's tiles, or a pair's, or both
  parts.dq_parts = append(parts.bytes, dq_parts * sm90::kFewQueries * head_dim * int64_t{sizeof(float)});
  parts.dq_nan_flags = append(parts.bytes, pairs * sm90::kFewQueries / kFlagRows);
  parts.dkdv_nan_flags = append(parts.bytes, count_tiles(p) * kFlagsOfTile);
  return plan;
}

}  // namespace flash_attn_ext::plan
