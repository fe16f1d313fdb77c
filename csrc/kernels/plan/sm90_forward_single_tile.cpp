#include <algorithm>

#include "kernels/config/sm90.h"
#include "kernels/plan/sm80.h"
#include "kernels/plan/sm90.h"
#include "kernels/plan/workspace.h"

namespace flash_attn_ext::plan {
namespace {

constexpr int kTileQueries = 64;

// The query tiles of a head that one work tile has. More of them read the keys less often, fewer fill the SMs more
// evenly. A result does not depend on it.
int64_t query_tiles_of_work_tile(const attention::ForwardParams& p, const Limits& limits) {
  constexpr int64_t kMost = 16;
  constexpr int64_t kCostOfKeys = 1;  // of reading the keys of a work tile, in query tiles
  const int64_t tiles = sm80::num_tiles(p.sequences.max_seqlen_q, kTileQueries);
  const auto cost = [&](int64_t count) {
    const int64_t work_tiles = p.batch * p.num_heads_q * sm80::num_tiles(tiles, static_cast<int>(count));
    return (work_tiles + limits.sms - 1) / limits.sms * (count + kCostOfKeys);
  };
  int64_t best = 1;
  for (int64_t count = 2; count <= std::min(tiles, kMost); ++count) {
    if (cost(count) <= cost(best)) best = count;
  }
  return best;
}

}  // namespace

bool takes_single_tile(const attention::ForwardParams& p) {
  constexpr sm90::HeadDims kDims = sm90::kSingleTileHeadDims;
  if (wanted_variant_sm90(p) != Variant::kPlain || p.head_dim_qk > kDims.qk || p.head_dim_v > kDims.v) return false;
  return p.sequences.max_seqlen_k <=
         (p.visibility.one_sided() ? sm90::kMostKeysOfSingleTileOneSided : sm90::kMostKeysOfSingleTile);
}

ForwardPlan plan_forward_single_tile(const attention::ForwardParams& p, const Limits& limits) {
  ForwardPlan plan;
  plan.kernel = ForwardKernel::kWarpSpecialised;
  plan.variant = Variant::kSingleTile;
  plan.head_dim = sm90::kSingleTileHeadDims.qk;
  plan.head_dim_v = sm90::kSingleTileHeadDims.v;
  const int keys = *std::ranges::lower_bound(sm90::kSingleTile, p.sequences.max_seqlen_k);
  const sm90::SingleTileShape tile = sm90::single_tile_shape(keys);
  const int64_t query_tiles = query_tiles_of_work_tile(p, limits);
  plan.tile = {.queries = static_cast<int>(query_tiles * kTileQueries),
               .keys = keys,
               .warps = 4 * tile.warpgroups,
               .columns = sm90::kSingleTileHeadDims.v,
               .blocks = 1,
               .stages = tile.key_stages};
  plan.nan_repair = NanRepair::kInKernel;
  plan.l2_bytes = limits.l2_bytes;
  plan.persistent_ctas = limits.sms;
  const int64_t work_tiles = p.batch * p.num_heads_q * sm80::num_tiles(p.sequences.max_seqlen_q, plan.tile.queries);
  plan.workspace.nan_flags = append(plan.workspace.bytes, work_tiles * query_tiles * (kTileQueries / 16));
  return plan;
}

}  // namespace flash_attn_ext::plan
