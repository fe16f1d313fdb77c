// mask_bits = the mask, a bit for each query and key (attention::MaskBits), and mask_tiles = whether a True and whether
// a False is in each tile of 64 x 64 (attention::MaskTiles).
//
// Grid: a block for 64 queries x 1024 keys of the mask as it is stored (broadcast dimensions once), also for the group
// of keys behind each query's last. A warp takes four queries at a time: of each, eight lanes 128 neighbouring keys
// each. Bound: memory; every byte of the mask is read once.
#include "attention/divisor.h"
#include "kernels/common/mask_tiles.h"
#include "kernels/plan/mask_tiles.h"

namespace flash_attn_ext::common {
namespace {

using attention::Divisor;
using attention::MaskBits;
using attention::MaskTiles;

constexpr int kLanes = 8;  // of a query
constexpr int kQueriesAtOnce = 32 / kLanes;
constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kVectorBytes = 16;
static_assert(MaskBits::kKeys == 2 * MaskTiles::kSize);

// Blocks by keys first, then queries, then heads and batch entries.
struct MaskGrid {
  Divisor keys;
  Divisor queries;
  Divisor heads;
  uint32_t groups;  // of keys, that a query has
  int rows;         // queries that there are
  uint32_t key_tiles;
};

// 128 keys of a query, in the order of MaskBits.
struct GroupBits {
  uint32_t words[4] = {};
  uint32_t missing[4] = {};  // keys that there are not

  __device__ __forceinline__ void read(const uint8_t* first, int64_t key_stride, int keys) {
    if (key_stride == 1 && keys == MaskBits::kKeys && reinterpret_cast<uintptr_t>(first) % kVectorBytes == 0) {
#pragma unroll
      for (int i = 0; i < MaskBits::kKeys / kVectorBytes; ++i) {
        const uint4 bytes = reinterpret_cast<const uint4*>(first)[i];
        add(words, {bytes.x, bytes.y}, 2 * i);
        add(words, {bytes.z, bytes.w}, 2 * i + 1);
      }
      return;
    }
#pragma unroll 1
    for (int j = 0; j < MaskBits::kKeys / 8; ++j) {
      uint32_t attended[2] = {};
      uint32_t beyond[2] = {};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int key = 8 * j + i;
        const bool exists = key < keys;
        attended[i / 4] |= (exists && first[key * key_stride] != 0 ? 1u : 0u) << i % 4 * 8;
        beyond[i / 4] |= (exists ? 0u : 1u) << i % 4 * 8;
      }
      add(words, {attended[0], attended[1]}, j);
      add(missing, {beyond[0], beyond[1]}, j);
    }
  }

  // What is in its two tiles, a byte each.
  __device__ __forceinline__ uint32_t tile_flags() const {
    uint32_t some_true = 0;
    uint32_t some_false = 0;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      some_true |= words[t];
      some_false |= ~(words[t] | missing[t]);
    }
    const auto flags = [&](uint32_t half) {
      return ((some_true & half) != 0 ? MaskTiles::kSomeTrue : 0u) |
             ((some_false & half) != 0 ? MaskTiles::kSomeFalse : 0u);
    };
    return flags(0xFFFFu) | flags(0xFFFF0000u) << 8;
  }

 private:
  // Of 8 keys, bytes that are 0 or 1: key 2 t + e becomes bit 2 j + e of word t.
  __device__ __forceinline__ static void add(uint32_t (&to)[4], uint2 bytes, int j) {
    const uint32_t halves[4] = {bytes.x & 0xFFFFu, bytes.x >> 16, bytes.y & 0xFFFFu, bytes.y >> 16};
#pragma unroll
    for (int t = 0; t < 4; ++t) to[t] |= ((halves[t] | halves[t] >> 7) & 3u) << (2 * j);
  }
};

__global__ void __launch_bounds__(kThreads)
    mask_bits_kernel(const __grid_constant__ attention::AttentionParams p, const __grid_constant__ MaskGrid grid) {
  __shared__ uint32_t flags_of_warps[kWarps][kLanes];
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
  if (group < grid.groups) {
    for (int query = first_query + warp * kQueriesAtOnce + lane / kLanes; query < end;
         query += kWarps * kQueriesAtOnce) {
      GroupBits bits;
      bits.read(static_cast<const uint8_t*>(mask.data) + mask.offset({batch, head, query, first_key}), mask.key_stride,
                keys);
      flags |= bits.tile_flags();
      const int64_t index = (int64_t{pair} * grid.rows + query) * grid.groups + group;
      reinterpret_cast<uint4*>(p.score_mod.mask_bits.data)[index] = {bits.words[0], bits.words[1], bits.words[2],
                                                                     bits.words[3]};
    }
  }
#pragma unroll
  for (int other = kLanes; other < 32; other *= 2) flags |= __shfl_xor_sync(0xFFFFFFFFu, flags, other);
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
  const int64_t groups = (params.sequences.max_seqlen_k + MaskBits::kKeys - 1) / MaskBits::kKeys + 1;
  const int64_t key_blocks = (groups + kLanes - 1) / kLanes;
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
  mask_bits_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(params, grid);
  return cudaGetLastError();
}

}  // namespace flash_attn_ext::common
