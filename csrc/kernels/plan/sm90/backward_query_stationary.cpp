// Plans Hopper's query-stationary backward kernel, for few queries and many keys.
#include <algorithm>
#include <iterator>

#include "attention/division.h"
#include "kernels/config/key_stationary.h"
#include "kernels/config/query_stationary.h"
#include "kernels/plan/mask_tiles.h"
#include "kernels/plan/plan.h"
#include "kernels/plan/sm80/sm80.h"
#include "kernels/plan/sm90/sm90.h"

namespace flash_attn_ext::plan {
namespace {

using attention::BackwardParams;

constexpr int64_t kTileQueries = 64;  // of a warpgroup
constexpr int64_t kFlagRows = 16;     // rows of a non-finite flag
constexpr int64_t kFlagsOfTile = sm90::kStationaryQueriesKeys / kFlagRows;
constexpr int64_t kMostTiles = INT32_MAX / kFlagsOfTile;    // the kernel numbers flags in 32 bits
constexpr int64_t kMostMaskBytes = int64_t{INT32_MAX} * 4;  // and words of the mask's bits

int64_t count_tiles(const BackwardParams& p) {
  const int64_t of_a_pair = attention::ceil_div(p.sequences.max_seqlen_k, sm90::kStationaryQueriesKeys);
  return p.batch * p.num_heads_q * of_a_pair;
}

// As many CTAs as SMs, or slightly fewer if each CTA then has tiles of one pair only
// (docs/kernels/log/sm90_backward.md, "Figures behind plans").
int64_t count_blocks(int64_t pairs, int64_t sms) {
  const int64_t whole = sms / pairs * pairs;
  return 20 * whole >= 19 * sms ? whole : sms;
}

// Whether the table has a row for the call's scores. Of intervals and lists of blocks there are no bits to read.
bool has_score_mode(const BackwardParams& p) {
  const ScoreMode score = score_mode_sm90(p);
  if (score != ScoreMode::kMask) return score == ScoreMode::kScaleOnly;
  return !p.score_mod.selects_keys() && mask_bits_bytes(p) <= kMostMaskBytes;
}

}  // namespace

bool takes_query_stationary(const BackwardParams& p) {
  const attention::SequenceTable& lengths = p.sequences;
  if (!has_score_mode(p) || largest_head_dim(p) > sm90::kLargestKeyStationaryHeadDim) return false;
  if (!p.visibility.unlimited() || is_packed(p) || p.num_heads_q != p.num_heads_k) return false;
  if (count_tiles(p) > kMostTiles) return false;
  const int64_t queries = lengths.max_seqlen_q;
  if (queries > sm90::kStationaryQueries || lengths.max_seqlen_k <= kShortTokens) return false;
  // With this many queries both warpgroups have some.
  const bool fills_tile = queries > kTileQueries;
  return fills_tile || lengths.max_seqlen_k > kMostKeysPerQuery * queries;
}

BackwardPlan plan_backward_query_stationary(const BackwardParams& p, const Limits& limits) {
  BackwardPlan plan;
  const int64_t pairs = p.batch * p.num_heads_q;
  const ScoreMode score = score_mode_sm90(p);
  const auto* const row = std::ranges::find_if(sm90::kQueryStationaryConfigs, [&](const auto& config) {
    return config.score == score && config.dims.fit(p.head_dim_qk, p.head_dim_v);
  });
  plan.row = static_cast<int>(row - std::begin(sm90::kQueryStationaryConfigs));
  const int head_dim = row->dims.qk;
  plan.kernels = BackwardKernels::kQueryStationary;
  plan.delta = DeltaSource::kOwnKernel;
  plan.dq_head_dim = plan.dkdv_head_dim = head_dim;
  plan.dq_score = plan.dkdv_score = score;
  plan.nan_repair = NanRepair::kOwnLaunch;
  plan.persistent_ctas = std::min(count_tiles(p), count_blocks(pairs, limits.sms));
  BackwardPlan::Workspace& parts = plan.workspace;
  parts.delta = append(parts.bytes, statistic_bytes(p));
  if (score == ScoreMode::kMask) {
    // The kernel that packs the bits writes the flags of tiles beside them.
    parts.mask_tiles = append(parts.bytes, mask_tiles_bytes(p));
    parts.mask_bits = append(parts.bytes, mask_bits_bytes(p));
  }
  const int64_t partials = plan.persistent_ctas + pairs - 1;  // each one ends a CTA's tiles, or a pair's, or both
  parts.dq_partials = append(parts.bytes, partials * sm90::kStationaryQueries * head_dim * int64_t{sizeof(float)});
  parts.dq_nan_flags = append(parts.bytes, pairs * sm90::kStationaryQueries / kFlagRows);
  parts.dkdv_nan_flags = append(parts.bytes, count_tiles(p) * kFlagsOfTile);
  return plan;
}

}  // namespace flash_attn_ext::plan
