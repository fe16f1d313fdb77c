// Scans intervals: mask_tiles has two flags for each tile of 64 queries x 64 keys, whether some pair is visible and
// whether some pair is hidden.
//
// Grid: one CTA per 64 queries of each batch entry and head that has intervals of its own. A thread has every 256th
// tile of keys. The kernel is bound by the latency of its first load, and by the bytes that it writes.
#include "attention/division.h"
#include "kernels/common/launch/launch_early.cuh"
#include "kernels/common/masks/interval_rows.cuh"
#include "kernels/common/masks/mask_tiles.h"
#include "kernels/plan/mask_tiles.h"
#include "ptx/dependent_launch.h"

namespace flash_attn_ext::common {
namespace {

using attention::MaskTiles;

constexpr int kThreads = 256;
static_assert(kThreads / 32 >= IntervalRows::kMost);

__global__ void __launch_bounds__(kThreads)
    interval_tiles_kernel(const __grid_constant__ attention::AttentionParams p, const plan::MaskTileCounts counts) {
  __shared__ IntervalRows rows;
  ptx::wait_for_kernel_before();
  ptx::allow_dependent_launch();
  const auto queries = static_cast<uint32_t>(counts.queries);
  const auto heads = static_cast<uint32_t>(counts.heads);
  const uint32_t pair = blockIdx.x / queries;
  const auto first_query = static_cast<int>(blockIdx.x % queries) * IntervalRows::kQueries;
  const attention::Sequence sequence = p.sequence_of(pair / heads);
  rows.load(p, sequence, static_cast<int>(pair % heads), first_query);
  const auto tiles = static_cast<int>(counts.keys);
  const auto num_keys = static_cast<int>(sequence.num_keys);
  if (rows.rows == 0) return;
  uint8_t* const flags = p.score_mod.mask_tiles.row(sequence.batch, pair % heads, first_query / IntervalRows::kQueries);
  constexpr int kKeys = static_cast<int>(MaskTiles::kSize);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int tile = static_cast<int>(threadIdx.x); tile - lane < tiles; tile += kThreads) {
    const uint32_t found = tile < tiles ? rows.flags(tile * kKeys, min((tile + 1) * kKeys, num_keys)) : 0;
    // Kernels that go through the keys in descending order skip hidden tiles together. Gaps between the visible tiles
    // of a warp count, too.
    const uint32_t seen = __ballot_sync(0xFFFFFFFFu, (found & MaskTiles::kSomeTrue) != 0);
    const uint32_t seen_before = seen & ((1u << lane) - 1);
    const int in_warp = lane - (32 - __clz(static_cast<int>(seen_before)));
    const int end = rows.end_before(tile * kKeys);
    const int outside = tile - (end + kKeys - 1) / kKeys;
    const uint32_t hidden_before = end == 0
                                       ? MaskTiles::kAllBefore
                                       : MaskTiles::encode_hidden_before(static_cast<uint32_t>(max(in_warp, outside)));
    if (tile < tiles) flags[tile] = static_cast<uint8_t>(found | hidden_before << MaskTiles::kHiddenBeforeShift);
  }
}

}  // namespace

cudaError_t scan_interval_tiles(const attention::AttentionParams& params, cudaStream_t stream) {
  const plan::MaskTileCounts counts = plan::count_mask_tiles(params);
  const int64_t blocks = counts.batch * counts.heads * counts.queries;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  return launch_early(interval_tiles_kernel, {.blocks = blocks, .threads = kThreads}, stream, params, counts);
}

}  // namespace flash_attn_ext::common
