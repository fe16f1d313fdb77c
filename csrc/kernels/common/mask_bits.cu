// mask_bits = the mask, a bit for each query and key (attention::MaskBits), and mask_tiles = whether a True and whether
// a False is in each tile of 64 x 64 (attention::MaskTiles).
//
// Grid: a block for 64 queries x 1024 keys of the mask as it is stored (broadcast dimensions once), also for the group
// of keys behind each query's last. A warp takes four queries at a time: of each, eight lanes 128 neighbouring keys
// each, of which a lane reads its own 16 at a time, or the whole warp all of them where they do not lie so. Bound:
// memory; every byte of the mask is read once.
#include "attention/divisor.h"
#include "kernels/common/mask_tiles.h"
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
constexpr int kVectorBytes = 16;
constexpr uint32_t kAllLanes = 0xFFFFFFFFu;
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

// Where 128 keys of a query lie, of which there may be fewer, or none.
struct KeyGroup {
  const uint8_t* first;
  int64_t key_stride;
  int keys;

  __device__ __forceinline__ bool in_vectors() const {
    return key_stride == 1 && keys == MaskBits::kKeys && reinterpret_cast<uintptr_t>(first) % kVectorBytes == 0;
  }
};

// Their bits, in the order of MaskBits: key 8 j + 2 t + e is bit 2 j + e of word t.
struct GroupBits {
  uint32_t words[4] = {};
  uint32_t missing[4] = {};  // keys that there are not

  // By all lanes of a warp, each of which wants a group of its own.
  __device__ __forceinline__ void read(const KeyGroup& own) {
    const bool in_vectors = own.in_vectors();
    if (in_vectors) read_vectors(own);
    if (own.keys <= 0) {
#pragma unroll
      for (uint32_t& word : missing) word = ~0u;
    }
    uint32_t pending = __ballot_sync(kAllLanes, !in_vectors && own.keys > 0);
#pragma unroll 1
    while (pending != 0) {
      int owners[kGroupsAtOnce];
      uint8_t bytes[kGroupsAtOnce][4];
      int keys[kGroupsAtOnce];
#pragma unroll
      for (int i = 0; i < kGroupsAtOnce; ++i) {
        owners[i] = pending == 0 ? kNobody : __ffs(static_cast<int>(pending)) - 1;
        pending &= pending - 1;
        keys[i] = read_together(bytes[i], own, owners[i]);
      }
#pragma unroll
      for (int i = 0; i < kGroupsAtOnce; ++i) take(bytes[i], keys[i], owners[i]);
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
  static constexpr int kNobody = 32;
  static constexpr int kGroupsAtOnce = 8;

  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  // Of the keys whose bits a lane's vote makes: bit `lane` of word t.
  __device__ __forceinline__ static int key_of_lane(int t) { return lane() / 2 * 8 + 2 * t + lane() % 2; }

  __device__ __forceinline__ void read_vectors(const KeyGroup& own) {
#pragma unroll
    for (int i = 0; i < MaskBits::kKeys / kVectorBytes; ++i) {
      const uint4 bytes = reinterpret_cast<const uint4*>(own.first)[i];
      add(words, {bytes.x, bytes.y}, 2 * i);
      add(words, {bytes.z, bytes.w}, 2 * i + 1);
    }
  }

  // Four keys for each lane, of the owner's group. How many keys it has.
  __device__ __forceinline__ static int read_together(uint8_t (&bytes)[4], const KeyGroup& own, int owner) {
    const auto first = __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(own.first), owner);
    const int keys = owner == kNobody ? 0 : __shfl_sync(kAllLanes, own.keys, owner);
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const int key = key_of_lane(t);
      bytes[t] = key < keys ? reinterpret_cast<const uint8_t*>(first)[key * own.key_stride] : uint8_t{0};
    }
    return keys;
  }
  __device__ __forceinline__ void take(const uint8_t (&bytes)[4], int keys, int owner) {
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const uint32_t attended = __ballot_sync(kAllLanes, bytes[t] != 0);
      const uint32_t beyond = __ballot_sync(kAllLanes, key_of_lane(t) >= keys);
      if (lane() != owner) continue;
      words[t] = attended;
      missing[t] = beyond;
    }
  }

  // Of 8 keys, bytes that are 0 or 1.
  __device__ __forceinline__ static void add(uint32_t (&to)[4], uint2 bytes, int j) {
    const uint32_t halves[4] = {bytes.x & 0xFFFFu, bytes.x >> 16, bytes.y & 0xFFFFu, bytes.y >> 16};
#pragma unroll
    for (int t = 0; t < 4; ++t) to[t] |= ((halves[t] | halves[t] >> 7) & 3u) << (2 * j);
  }
};

__global__ void __launch_bounds__(kThreads)
    mask_bits_kernel(const __grid_constant__ attention::AttentionParams p, const __grid_constant__ MaskGrid grid) {
  __shared__ uint32_t flags_of_warps[kWarps][kLanes];
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
