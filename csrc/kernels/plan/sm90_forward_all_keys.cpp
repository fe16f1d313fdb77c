#include <algorithm>

#include "kernels/plan/sm80.h"
#include "kernels/plan/sm90.h"
#include "kernels/plan/workspace.h"
#include "kernels/tile_config_sm90.h"

namespace flash_attn_ext::plan {
namespace {

constexpr int kTileQueries = 64;

// Tiles of queries of a head that one block works on: more of them read the keys less often, fewer fill the
// multiprocessors more evenly. A result does not depend on it.
int64_t query_tiles_of_unit(const attention::ForwardParams& p, const Limits& limits) {
  constexpr int64_t kMost = 16;
  constexpr int64_t kCostOfKeys = 1;  // of reading a unit's keys, in tiles of queries
  const int64_t tiles = sm80::num_tiles(p.sequences.max_seqlen_q, kTileQueries);
  const auto cost = [&](int64_t count) {
    const int64_t units = p.batch * p.num_heads_q * sm80::num_tiles(tiles, static_cast<int>(count));
    return (units + limits.multiprocessors - 1) / limits.multiprocessors * (count + kCostOfKeys);
  };
  int64_t best = 1;
  for (int64_t count = 2; count <= std::min(tiles, kMost); ++count) {
    if (cost(count) <= cost(best)) best = count;
  }
  return best;
}

}  // namespace

bool takes_all_keys(const attention::ForwardParams& p) {
  constexpr sm90::HeadDims kDims = sm90::kAllKeysHeadDims;
  if (wanted_variant_sm90(p) != Variant::kPlain || p.head_dim_qk > kDims.qk || p.head_dim_v > kDims.v) return false;
  return p.sequences.max_seqlen_k <= (p.visibility.one_sided() ? sm90::kMostAllKeysOneSided : sm90::kMostAllKeys);
}

ForwardPlan plan_forward_all_keys(const attention::ForwardParams& p, const Limits& limits) {
  ForwardPlan plan;
  plan.kernel = ForwardKernel::kWarpSpecialised;
  plan.variant = Variant::kAllKeys;
  plan.head_dim = sm90::kAllKeysHeadDims.qk;
  plan.head_dim_v = sm90::kAllKeysHeadDims.v;
  const int keys = *std::ranges::lower_bound(sm90::kAllKeys, p.sequences.max_seqlen_k);
  const sm90::AllKeysTile tile = sm90::all_keys_tile(keys);
  const int64_t query_tiles = query_tiles_of_unit(p, limits);
  plan.tile = {.queries = static_cast<int>(query_tiles * kTileQueries),
               .keys = keys,
               .warps = 4 * tile.warpgroups,
               .columns = sm90::kAllKeysHeadDims.v,
               .blocks = 1,
               .stages = tile.key_stages};
  plan.nan_repair = NanRepair::kInKernel;
  plan.l2_bytes = limits.l2_bytes;
  plan.resident_blocks = limits.multiprocessors;
  const int64_t units = p.batch * p.num_heads_q * sm80::num_tiles(p.sequences.max_seqlen_q, plan.tile.queries);
  plan.workspace.nan_flags = append(plan.workspace.bytes, units * query_tiles * (kTileQueries / 16));
  return plan;
}

}  // namespace flash_attn_ext::plan
