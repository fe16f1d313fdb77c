// Packs the mask: mask_bits has a bit for each query and key (attention::MaskBits), and mask_tiles says whether each
// tile of 64 x 64 has a True and whether it has a False (attention::MaskTiles).
//
// Grid: one CTA for 64 queries x 1024 keys of the mask as it is stored (broadcast dimensions once), also for the group
// of keys after each query's last one. A warp has four queries at a time, with eight lanes for each. A lane has a group
// of 128 neighbouring keys, and reads 16 of them at a time. Where alignment or strides forbid it, the whole warp reads
// each lane's group together. The kernel is memory-bound: every byte of the mask is read once.
#include "attention/division.h"
#include "kernels/common/launch/launch_early.cuh"
#include "kernels/common/masks/mask_group.cuh"
#include "kernels/common/masks/mask_tiles.h"
#include "kernels/plan/mask_tiles.h"
#include "ptx/dependent_launch.h"

namespace flash_attn_ext::common {
namespace {

using attention::Divisor;
using attention::MaskBits;
using attention::MaskTiles;

constexpr int kLanes = 8;  // of a query
constexpr int kQueriesAtOnce = 32 / kLanes;
constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr uint32_t kAllLanes = 0xFFFFFFFFu;

// CTAs are numbered by keys first, then queries, then heads and batch entries.
struct MaskGrid {
  Divisor keys;
  Divisor queries;
  Divisor heads;
  uint32_t groups;  // of keys, per query
  int rows;         // existing queries
  uint32_t key_tiles;
};

__global__ void __launch_bounds__(kThreads)
    mask_bits_kernel(const __grid_constant__ attention::AttentionParams p, const __grid_constant__ MaskGrid grid) {
  __shared__ uint32_t flags_of_warps[kWarps][kLanes];
  ptx::wait_for_kernel_before();
  ptx::allow_dependent_launch();
  const uint32_t row_of_blocks = grid.keys.quotient(blockIdx.x);
  const uint32_t key_block = blockIdx.x - row_of_blocks * grid.keys.divisor;
  const uint32_t pair = grid.queries.quotient(row_of_blocks);
  const uint32_t query_tile = row_of_blocks - pair * grid.queries.divisor;
  const uint32_t batch = grid.heads.quotient(pair);
  const uint32_t head = pair - batch * grid.heads.divisor;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const uint32_t group = key_block * kLanes + lane % kLanes;
  const int64_t first_key = int64_t{group} * MaskBits::kKeys;
  const auto keys = static_cast<int>(min(p.sequences.max_seqlen_k - first_key, MaskBits::kKeys));
  const attention::BroadcastView& mask = p.score_mod.mask;
  const auto first_query = static_cast<int>(query_tile * MaskTiles::kSize);
  const int end = min(first_query + static_cast<int>(MaskTiles::kSize), grid.rows);
  uint32_t flags = 0;
  for (int first = first_query + warp * kQueriesAtOnce; first < end; first += kWarps * kQueriesAtOnce) {
    const int query = first + lane / kLanes;
    const bool exists = query < end && group < grid.groups;
    GroupBits bits;
    bits.read({.first = static_cast<const uint8_t*>(mask.data) + mask.offset({batch, head, query, first_key}),
               .key_stride = mask.key_stride,
               .keys = exists ? keys : 0});
    if (!exists) continue;
    flags |= bits.tile_flags();
    const int64_t index = (int64_t{pair} * grid.rows + query) * grid.groups + group;
    reinterpret_cast<uint4*>(p.score_mod.mask_bits.data)[index] = {bits.words[0], bits.words[1], bits.words[2],
                                                                   bits.words[3]};
  }
#pragma unroll
  for (int other = kLanes; other < 32; other *= 2) flags |= __shfl_xor_sync(kAllLanes, flags, other);
  if (lane < kLanes) flags_of_warps[warp][lane] = flags;
  __syncthreads();
  const uint32_t tile = key_block * kLanes * 2 + threadIdx.x;
  if (threadIdx.x >= kLanes * 2 || tile >= grid.key_tiles) return;
  uint32_t found = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) found |= flags_of_warps[w][threadIdx.x / 2];
  const int64_t row_of_tiles = int64_t{pair} * grid.queries.divisor + query_tile;
  p.score_mod.mask_tiles.data[row_of_tiles * grid.key_tiles + tile] =
      static_cast<uint8_t>(found >> (threadIdx.x % 2 * 8));
}

}  // namespace

cudaError_t pack_mask(attention::AttentionParams& params, uint8_t* tiles, void* bits, cudaStream_t stream) {
  params.score_mod.mask_tiles = plan::mask_tiles_in(tiles, params);
  params.score_mod.mask_bits = plan::mask_bits_in(bits, params);
  const plan::MaskTileCounts counts = plan::count_mask_tiles(params);
  const int64_t groups = attention::ceil_div(params.sequences.max_seqlen_k, MaskBits::kKeys) + 1;
  const int64_t key_blocks = attention::ceil_div(groups, kLanes);
  const int64_t blocks = counts.batch * counts.heads * counts.queries * key_blocks;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  const auto divisor = [](int64_t n) { return Divisor::of(static_cast<uint32_t>(n)); };
  const bool per_query = params.score_mod.mask.query_stride != 0;
  const MaskGrid grid = {.keys = divisor(key_blocks),
                         .queries = divisor(counts.queries),
                         .heads = divisor(counts.heads),
                         .groups = static_cast<uint32_t>(groups),
                         .rows = per_query ? static_cast<int>(params.sequences.max_seqlen_q) : 1,
                         .key_tiles = static_cast<uint32_t>(counts.keys)};
  return launch_early(mask_bits_kernel, {.blocks = blocks, .threads = kThreads}, stream, params, grid);
}

}  // namespace flash_attn_ext::common
