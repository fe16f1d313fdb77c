// Makes mask_tiles of blocks, and of intervals beside them: two flags for each tile of 64 queries x 64 keys, whether
// some pair is visible and whether some pair is hidden. Blocks are made of whole tiles.
//
// Grid: without intervals, one warp per 64 queries of each batch entry and head that has blocks of its own, which has
// 32 tiles of keys at a time. With intervals, one CTA, of which a thread has every 256th tile of keys. The kernels are
// bound by the latency of their first load, and by the bytes that they write.
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
constexpr int kWarps = kThreads / 32;
constexpr int kKeys = static_cast<int>(MaskTiles::kSize);
static_assert(kWarps >= IntervalRows::kMost);

// The byte of a tile. before: the last tile with smaller keys that is seen, or -1. Kernels that go through the keys in
// descending order skip hidden tiles together.
__device__ __forceinline__ uint8_t encode(uint32_t flags, int tile, int before) {
  const uint32_t hidden_before =
      before < 0 ? MaskTiles::kAllBefore : MaskTiles::encode_hidden_before(static_cast<uint32_t>(tile - 1 - before));
  return static_cast<uint8_t>(flags | hidden_before << MaskTiles::kHiddenBeforeShift);
}

__global__ void __launch_bounds__(kThreads)
    block_tiles_kernel(const __grid_constant__ attention::AttentionParams p, const plan::MaskTileCounts counts) {
  ptx::wait_for_kernel_before();
  ptx::allow_dependent_launch();
  const int64_t index = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const int64_t pair = index / counts.queries;
  const int64_t batch = pair / counts.heads;
  const int64_t head = pair % counts.heads;
  const int64_t query_tile = index % counts.queries;
  if (batch >= counts.batch) return;
  const attention::BlockMask& blocks = p.score_mod.blocks;
  const uint8_t* const row = blocks.row(batch, head, query_tile * MaskTiles::kSize);
  uint8_t* const flags = p.score_mod.mask_tiles.row(batch, head, query_tile);
  const auto tiles = static_cast<int>(counts.keys);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int last = -1;  // that is seen
#pragma unroll 4
  for (int first = 0; first < tiles; first += 32) {
    const int tile = first + lane;
    const bool is_seen = tile < tiles && blocks.sees(row, tile * kKeys);
    const uint32_t seen = __ballot_sync(0xFFFFFFFFu, is_seen);
    const uint32_t seen_before = seen & ((1u << lane) - 1);
    const int before = seen_before == 0 ? last : first + 31 - __clz(static_cast<int>(seen_before));
    if (tile < tiles) flags[tile] = encode(is_seen ? MaskTiles::kSomeTrue : MaskTiles::kSomeFalse, tile, before);
    if (seen != 0) last = first + 31 - __clz(static_cast<int>(seen));
  }
}

// The last tile with smaller keys that is seen. All threads of the CTA take part.
struct SeenBefore {
  int (&last_of_warps)[kWarps];
  int last = -1;  // of all tiles before those of this round

  __device__ __forceinline__ int next(int first_of_round, bool is_seen) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int first_of_warp = first_of_round + warp * 32;
    const uint32_t seen = __ballot_sync(0xFFFFFFFFu, is_seen);
    if (lane == 0) last_of_warps[warp] = seen == 0 ? -1 : first_of_warp + 31 - __clz(static_cast<int>(seen));
    __syncthreads();
    int before = last;
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) before = max(before, last_of_warps[w]);
      last = max(last, last_of_warps[w]);
    }
    __syncthreads();
    const uint32_t seen_before = seen & ((1u << lane) - 1);
    return seen_before == 0 ? before : first_of_warp + 31 - __clz(static_cast<int>(seen_before));
  }
};

__global__ void __launch_bounds__(kThreads)
    selected_tiles_kernel(const __grid_constant__ attention::AttentionParams p, const plan::MaskTileCounts counts) {
  __shared__ IntervalRows rows;
  __shared__ int last_of_warps[kWarps];
  ptx::wait_for_kernel_before();
  ptx::allow_dependent_launch();
  const auto queries = static_cast<uint32_t>(counts.queries);
  const auto heads = static_cast<uint32_t>(counts.heads);
  const uint32_t pair = blockIdx.x / queries;
  const auto head = static_cast<int>(pair % heads);
  const auto first_query = static_cast<int>(blockIdx.x % queries) * IntervalRows::kQueries;
  const attention::Sequence sequence = p.sequence_of(pair / heads);
  rows.load(p, sequence, head, first_query);
  if (rows.rows == 0) return;
  const attention::BlockMask& blocks = p.score_mod.blocks;
  const uint8_t* const row = blocks.row(sequence.batch, head, first_query);
  uint8_t* const flags = p.score_mod.mask_tiles.row(sequence.batch, head, first_query / IntervalRows::kQueries);
  const auto tiles = static_cast<int>(counts.keys);
  const auto num_keys = static_cast<int>(sequence.num_keys);
  SeenBefore seen_before = {last_of_warps};
  for (int first = 0; first < tiles; first += kThreads) {
    const int tile = first + static_cast<int>(threadIdx.x);
    uint32_t found = MaskTiles::kSomeFalse;
    if (tile < tiles && blocks.sees(row, tile * kKeys)) {
      found = rows.flags(tile * kKeys, min((tile + 1) * kKeys, num_keys));
    }
    const int before = seen_before.next(first, (found & MaskTiles::kSomeTrue) != 0);
    if (tile < tiles) flags[tile] = encode(found, tile, before);
  }
}

}  // namespace

cudaError_t make_block_tiles(const attention::AttentionParams& params, cudaStream_t stream) {
  const plan::MaskTileCounts counts = plan::count_mask_tiles(params);
  const int64_t rows = counts.batch * counts.heads * counts.queries;
  if (rows > INT32_MAX) return cudaErrorInvalidConfiguration;
  if (params.score_mod.intervals.present()) {
    return launch_early(selected_tiles_kernel, {.blocks = rows, .threads = kThreads}, stream, params, counts);
  }
  const int64_t blocks = attention::ceil_div(rows, kWarps);
  return launch_early(block_tiles_kernel, {.blocks = blocks, .threads = kThreads}, stream, params, counts);
}

}  // namespace flash_attn_ext::common
