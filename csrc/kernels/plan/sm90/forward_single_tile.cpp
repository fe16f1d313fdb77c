// Plans Hopper's single-tile forward kernel, for sequences whose keys fit one tile.
#include <algorithm>
#include <iterator>
#include <optional>

#include "attention/division.h"
#include "kernels/config/sm90_forward.h"
#include "kernels/plan/plan.h"
#include "kernels/plan/sm80/sm80.h"
#include "kernels/plan/sm90/sm90.h"

namespace flash_attn_ext::plan {
namespace {

using sm90::SingleTileConfig;

constexpr int kTileQueries = 64;

// Where only one side is bounded, half of a tile is masked. With more keys than this, two CTAs per SM with smaller
// tiles are faster.
constexpr int64_t kMostKeysOneSided = 160;

// The query tiles of a head that one work tile has. More of them read the keys less often, fewer fill the SMs more
// evenly. A result does not depend on it.
int64_t query_tiles_of_work_tile(const attention::ForwardParams& p, const SingleTileConfig& config,
                                 const Limits& limits) {
  constexpr int64_t kMost = 16;
  // What loading the keys of a work tile costs, in quarters of a query tile's time. Loads of up to 128 keys mostly
  // overlap the previous work tile (docs/kernels/log/sm90.md, "The query tiles of a work tile").
  const int64_t cost_of_keys = config.block_n <= 128 ? 1 : 4;
  const int64_t tiles = attention::ceil_div(p.sequences.max_seqlen_q, kTileQueries);
  const auto cost = [&](int64_t count) {
    const int64_t work_tiles = p.batch * p.num_heads_q * attention::ceil_div(tiles, static_cast<int>(count));
    return attention::ceil_div(work_tiles, limits.sms) * (4 * count + cost_of_keys);
  };
  int64_t best = 1;
  for (int64_t count = 2; count <= std::min(tiles, kMost); ++count) {
    if (cost(count) < cost(best)) best = count;
  }
  return best;
}

// The score mode of a call, if there may be rows for it. A mask of keys counts as a key bias of 0 and -inf.
std::optional<ScoreMode> score_of(const attention::ForwardParams& p) {
  if (score_mode_sm90(p) == ScoreMode::kScaleOnly) return ScoreMode::kScaleOnly;
  if (has_only_alibi(p)) return ScoreMode::kAlibi;
  const bool has_bias = key_bias_score(p) == ScoreMode::kKeyBias;
  return has_bias || has_only_key_mask(p) ? std::optional(ScoreMode::kKeyBias) : std::nullopt;
}

// The first row that suits the scores and holds the head dims and all keys, or null.
const SingleTileConfig* find_row(const attention::ForwardParams& p) {
  const std::optional<ScoreMode> score = score_of(p);
  const SingleTileConfig* row = std::begin(sm90::kSingleTileConfigs);
  const SingleTileConfig* end = std::end(sm90::kSingleTileConfigs);
  row = std::find_if(row, end, [&](const SingleTileConfig& config) {
    return config.score == score && config.dims.fit(p.head_dim_qk, p.head_dim_v) &&
           config.block_n >= p.sequences.max_seqlen_k;
  });
  return row == end ? nullptr : row;
}

}  // namespace

bool takes_single_tile(const attention::ForwardParams& p) {
  return !p.cache.present() && find_row(p) != nullptr &&
         (!p.visibility.one_sided() || p.sequences.max_seqlen_k <= kMostKeysOneSided);
}

ForwardPlan plan_forward_single_tile(const attention::ForwardParams& p, const Limits& limits) {
  ForwardPlan plan;
  plan.row_max = p.row_max.present();
  plan.kernel = ForwardKernel::kSingleTile;
  const SingleTileConfig& config = *find_row(p);
  plan.score = config.score;
  plan.row = static_cast<int>(&config - sm90::kSingleTileConfigs);
  plan.head_dim = config.dims.qk;
  plan.head_dim_v = config.dims.v;
  const int64_t query_tiles = query_tiles_of_work_tile(p, config, limits);
  plan.tile = {.queries = static_cast<int>(query_tiles * kTileQueries),
               .keys = config.block_n,
               .warps = 4 * config.warpgroups,
               .columns = config.dims.v,
               .ctas_per_sm = 1,
               .stages = config.kv_stages};
  plan.nan_repair = NanRepair::kInKernel;
  plan.l2_bytes = limits.l2_bytes;
  plan.persistent_ctas = limits.sms;
  const int64_t work_tiles = p.batch * p.num_heads_q * attention::ceil_div(p.sequences.max_seqlen_q, plan.tile.queries);
  plan.workspace.nan_flags = append(plan.workspace.bytes, work_tiles * query_tiles * (kTileQueries / 16));
  return plan;
}

}  // namespace flash_attn_ext::plan
