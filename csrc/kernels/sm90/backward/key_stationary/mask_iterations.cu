// Fills args.mask (schedule/mask_iterations.h): one kernel packs the mask's bits, or looks at intervals and blocks, the
// next one ranks the contributors that are left and counts those of each query tile, and the last one lists the
// iterations.
#include "attention/division.h"
#include "kernels/common/launch/launch_early.cuh"
#include "kernels/common/masks/interval_rows.cuh"
#include "kernels/sm90/backward/key_stationary/arguments.h"
#include "ptx/dependent_launch.h"

namespace flash_attn_ext::sm90 {
namespace {

constexpr int kThreads = MaskIterations::kThreads;
constexpr int kKeys = LoopOrder::kKeys;
constexpr int kQueries = LoopOrder::kQueries;
constexpr int kWarpSize = 32;
constexpr int kGroupKeys = 16;  // of a warp of the backward kernel
constexpr int kGroups = kKeys / kGroupKeys;

// Called by each of the first kernels; ranks_kernel raises the number.
__device__ __forceinline__ void clear_most_contributors(const MaskIterations& iterations) {
  if (blockIdx.x == 0 && threadIdx.x == 0) *iterations.most_contributors = 0;
}

// A tile of the mask as it is stored. Its bits pass through shared memory in an order that takes few instructions.
// Otherwise instructions would bound the kernel, not memory.
struct MaskTile {
  // For each group of keys, the bits of all queries: bit i is key i. There are two queries more than a tile has, so
  // that threads of neighbouring groups write to different banks.
  using Bits = uint16_t[kGroups][kQueries + 2];

  const uint8_t* first;
  int64_t row_stride;
  int64_t key_stride;
  int rows;  // that exist
  int keys;

  __device__ __forceinline__ void load(Bits& bits) const {
    static_assert(kGroupKeys == sizeof(uint4));
    if (key_stride == 1 && keys == kKeys && row_stride % sizeof(uint4) == 0 &&
        reinterpret_cast<uintptr_t>(first) % sizeof(uint4) == 0) {
      load_groups(bits);
      return;
    }
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    constexpr int kWords = kKeys / kWarpSize;
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x) / kWarpSize; i < kQueries * kWords; i += kThreads / kWarpSize) {
      const int row = i / kWords;
      const int key = i % kWords * kWarpSize + lane;
      const bool attend = row < rows && key < keys && first[row * row_stride + key * key_stride] != 0;
      const uint32_t word = __ballot_sync(0xFFFFFFFFu, attend);
      if (lane % kGroupKeys == 0) bits[key / kGroupKeys][row] = static_cast<uint16_t>(word >> lane);
    }
  }

  // The bits of the backward kernel's thread that has this thread's index. Each word of `bits` has those of two
  // queries.
  __device__ __forceinline__ static uint32_t word_of_thread(const Bits& bits, bool per_query) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const uint16_t(&own)[kQueries + 2] = bits[threadIdx.x / kWarpSize];
    uint32_t word = 0;
#pragma unroll
    for (int j = 0; j < kQueries / 8; ++j) {
      const uint32_t queries =
          per_query ? *reinterpret_cast<const uint32_t*>(&own[8 * j + lane % 4 * 2]) : own[0] * 0x10001u;
      word |= (queries >> lane / 4 & 0x01010101u) << j;
    }
    return word;
  }

 private:
  // Loads 16 bytes at a time.
  __device__ __forceinline__ void load_groups(Bits& bits) const {
    constexpr int kRowStep = kThreads / kGroups;
    const int group = static_cast<int>(threadIdx.x) % kGroups;
    const int own = static_cast<int>(threadIdx.x) / kGroups;
    uint4 bytes[kQueries / kRowStep];
#pragma unroll
    for (int i = 0; i < kQueries / kRowStep; ++i) {
      const int row = own + i * kRowStep;
      bytes[i] = {0, 0, 0, 0};
      if (row < rows) bytes[i] = *reinterpret_cast<const uint4*>(first + row * row_stride + group * kGroupKeys);
    }
#pragma unroll
    for (int i = 0; i < kQueries / kRowStep; ++i) {
      const uint4& of = bytes[i];
      const uint32_t keys_of_row = bits_of(of.x) | bits_of(of.y) << 4 | bits_of(of.z) << 8 | bits_of(of.w) << 12;
      bits[group][own + i * kRowStep] = static_cast<uint16_t>(keys_of_row);
    }
  }

  // Packs four bytes that are 0 or 1, as PyTorch's booleans are.
  __device__ __forceinline__ static uint32_t bits_of(uint32_t bytes) { return bytes * 0x10204080u >> 28; }
};

struct MaskGrid {
  attention::Divisor query_tiles;
  attention::Divisor key_tiles;
  attention::Divisor heads;
};

// Grid: a CTA per tile of the mask as it is stored (broadcast dimensions once). Every byte of the mask is read once.
__global__ void __launch_bounds__(kThreads)
    mask_words_kernel(const __grid_constant__ attention::AttentionParams p,
                      const __grid_constant__ MaskIterations iterations, const __grid_constant__ MaskGrid grid) {
  __shared__ alignas(4) MaskTile::Bits bits;
  ptx::wait_for_kernel_before();
  ptx::allow_dependent_launch();
  uint32_t index = blockIdx.x;
  clear_most_contributors(iterations);
  const auto next = [&](const attention::Divisor& count) {
    const uint32_t rest = count.quotient(index);
    const auto at = static_cast<int>(index - rest * count.divisor);
    index = rest;
    return at;
  };
  const int first_query = next(grid.query_tiles) * kQueries;
  const int first_key = next(grid.key_tiles) * kKeys;
  const int head = next(grid.heads);
  const attention::BroadcastView& mask = p.score_mod.mask;
  const bool per_query = mask.query_stride != 0;
  const MaskTile tile = {
      .first = static_cast<const uint8_t*>(mask.data) + mask.offset({index, head, first_query, first_key}),
      .row_stride = mask.query_stride,
      .key_stride = mask.key_stride,
      .rows = per_query ? static_cast<int>(min(p.sequences.max_seqlen_q - first_query, int64_t{kQueries})) : 1,
      .keys = static_cast<int>(min(p.sequences.max_seqlen_k - first_key, int64_t{kKeys}))};
  tile.load(bits);
  __syncthreads();
  const uint32_t word = MaskTile::word_of_thread(bits, per_query);
  iterations.words[int64_t{blockIdx.x} * kThreads + threadIdx.x] = word;
  const int some_true = __syncthreads_or(word != 0);
  const int some_false = __syncthreads_or(word != 0xFFFFFFFFu);
  if (threadIdx.x == 0) {
    iterations.tiles[blockIdx.x] = static_cast<uint8_t>((some_true != 0 ? MaskIterations::kSomeTrue : 0) |
                                                        (some_false != 0 ? MaskIterations::kSomeFalse : 0));
  }
}

cudaError_t pack_words(const KeyStationaryArguments& args, cudaStream_t stream) {
  const MaskIterations& mask = args.mask;
  const MaskGrid grid = {attention::Divisor::of(static_cast<uint32_t>(mask.mask_query_tiles)),
                         attention::Divisor::of(static_cast<uint32_t>(mask.key_tiles)),
                         attention::Divisor::of(static_cast<uint32_t>(mask.mask_heads))};
  const attention::AttentionParams& params = args.params;
  return common::launch_early(mask_words_kernel, {.blocks = mask.num_tiles(), .threads = kThreads}, stream, params,
                              mask, grid);
}

// The flags of a tile of keys, from what intervals and blocks leave of it.
struct SelectedKeys {
  const common::IntervalRows& rows;
  const attention::BlockMask& blocks;
  const uint8_t* block_row;  // of the queries
  int num_keys;

  __device__ __forceinline__ uint32_t flags(int tile) const {
    const int first = tile * kKeys;
    const int end = min(first + kKeys, num_keys);
    if (!blocks.present()) return rows.flags(first, end);
    const int middle = min(first + kWarpgroupKeys, end);
    const bool sees_low = blocks.sees(block_row, first);
    const bool sees_high = middle < end && blocks.sees(block_row, middle);
    if (sees_low && (sees_high || middle == end)) return rows.flags(first, end);
    if (!sees_low && !sees_high) return MaskIterations::kSomeFalse;
    return rows.flags(sees_low ? first : middle, sees_low ? middle : end) | MaskIterations::kSomeFalse;
  }

 private:
  static constexpr int kWarpgroupKeys = kKeys / LoopOrder::kKeyWarpgroups;
};

constexpr int kKeyTilesAtOnce = 16;

// Writes the flags of all tiles where blocks, and no intervals, hide keys. Grid: a CTA per plane, kThreads query tiles
// and kKeyTilesAtOnce key tiles. A thread has a query tile, so that neighbouring threads write neighbouring flags.
__global__ void __launch_bounds__(kThreads) block_flags_kernel(const __grid_constant__ attention::AttentionParams p,
                                                               const __grid_constant__ MaskIterations iterations) {
  ptx::wait_for_kernel_before();
  ptx::allow_dependent_launch();
  clear_most_contributors(iterations);
  const auto query_groups = static_cast<uint32_t>(LoopOrder::num_tiles(iterations.query_tiles, kThreads));
  const auto key_groups = static_cast<uint32_t>(LoopOrder::num_tiles(iterations.key_tiles, kKeyTilesAtOnce));
  const uint32_t rest = blockIdx.x / query_groups;
  const auto plane = static_cast<int>(rest / key_groups);
  const int batch = plane / iterations.mask_heads;
  const int head = plane % iterations.mask_heads;
  const int query_tile = static_cast<int>(blockIdx.x % query_groups) * kThreads + static_cast<int>(threadIdx.x);
  if (query_tile >= iterations.query_tiles) return;
  const attention::BlockMask& blocks = p.score_mod.blocks;
  const uint8_t* const row = blocks.row(batch, head, query_tile * kQueries);
  const auto num_keys = static_cast<int>(p.sequences.at(batch).num_keys);
  const int first_tile = static_cast<int>(rest % key_groups) * kKeyTilesAtOnce;
  for (int tile = first_tile; tile < min(first_tile + kKeyTilesAtOnce, iterations.key_tiles); ++tile) {
    const int first = tile * kKeys;
    const int middle = first + kKeys / LoopOrder::kKeyWarpgroups;
    const bool sees_low = blocks.sees(row, first);
    const bool sees_high = middle < num_keys ? blocks.sees(row, middle) : sees_low;
    iterations.tiles[iterations.tile(iterations.first_tile(batch, head, tile), query_tile)] =
        static_cast<uint8_t>((sees_low || sees_high ? MaskIterations::kSomeTrue : 0) |
                             (sees_low && sees_high ? 0 : MaskIterations::kSomeFalse));
  }
}

// Writes the flags of all tiles where intervals hide keys, or intervals and blocks. Grid: a CTA per query tile of each
// batch entry and head that has intervals or blocks of its own. A thread has every 256th tile of keys.
__global__ void __launch_bounds__(kThreads) selected_flags_kernel(const __grid_constant__ attention::AttentionParams p,
                                                                  const __grid_constant__ MaskIterations iterations) {
  __shared__ common::IntervalRows rows;
  static_assert(common::IntervalRows::kQueries == kQueries && kThreads / kWarpSize >= common::IntervalRows::kMost);
  ptx::wait_for_kernel_before();
  ptx::allow_dependent_launch();
  clear_most_contributors(iterations);
  const auto query_tiles = static_cast<uint32_t>(iterations.query_tiles);
  const auto heads = static_cast<uint32_t>(iterations.mask_heads);
  const uint32_t pair = blockIdx.x / query_tiles;
  const auto query_tile = static_cast<int>(blockIdx.x % query_tiles);
  const auto batch = static_cast<int>(pair / heads);
  const auto head = static_cast<int>(pair % heads);
  const attention::Sequence sequence = p.sequences.at(batch);
  rows.load(p, sequence, head, query_tile * kQueries);
  int32_t* const bounds = iterations.bounds_of(batch, head, query_tile);
  for (int i = static_cast<int>(threadIdx.x); i < 2 * iterations.intervals * kQueries; i += kThreads) {
    const int row = i % kQueries;
    const int m = i / kQueries;
    bounds[i] = row >= rows.rows ? 0 : m % 2 == 0 ? rows.begins[m / 2][row] : rows.ends[m / 2][row];
  }
  const auto num_keys = static_cast<int>(sequence.num_keys);
  const attention::BlockMask& blocks = p.score_mod.blocks;
  const SelectedKeys keys = {rows, blocks, blocks.present() ? blocks.row(batch, head, query_tile * kQueries) : nullptr,
                             num_keys};
  for (int tile = static_cast<int>(threadIdx.x); tile < iterations.key_tiles; tile += kThreads) {
    uint32_t flags = keys.flags(tile);
    // Queries and keys that do not exist are masked.
    if (rows.rows < kQueries || (tile + 1) * kKeys > num_keys) flags |= MaskIterations::kSomeFalse;
    iterations.tiles[iterations.tile(iterations.first_tile(batch, head, tile), query_tile)] =
        static_cast<uint8_t>(flags);
  }
}
static_assert(MaskIterations::kSomeTrue == attention::MaskTiles::kSomeTrue &&
              MaskIterations::kSomeFalse == attention::MaskTiles::kSomeFalse);

cudaError_t scan_selected_keys(const KeyStationaryArguments& args, cudaStream_t stream) {
  const MaskIterations& mask = args.mask;
  const attention::AttentionParams& params = args.params;
  const int64_t planes = int64_t{mask.mask_batches} * mask.mask_heads;
  if (mask.intervals == 0) {
    const int64_t groups = int64_t{LoopOrder::num_tiles(mask.query_tiles, kThreads)} *
                           LoopOrder::num_tiles(mask.key_tiles, kKeyTilesAtOnce);
    return common::launch_early(block_flags_kernel, {.blocks = planes * groups, .threads = kThreads}, stream, params,
                                mask);
  }
  const int64_t blocks = planes * mask.query_tiles;
  return common::launch_early(selected_flags_kernel, {.blocks = blocks, .threads = kThreads}, stream, params, mask);
}

// A list's place: the lists of a plane have one loop direction, and belong to a batch entry and a head.
struct ListPlane {
  LoopDirection direction;
  int batch;
  int head;

  __device__ __forceinline__ static ListPlane of(const KeyStationaryArguments& args, uint32_t plane) {
    const MaskIterations& mask = args.mask;
    const uint32_t pair = plane / static_cast<uint32_t>(mask.directions);
    const bool descends = plane % static_cast<uint32_t>(mask.directions) == 1;
    return {.direction = args.order.cyclic ? LoopDirection::kCyclic
                         : descends        ? LoopDirection::kDescending
                                           : LoopDirection::kAscending,
            .batch = static_cast<int>(pair / static_cast<uint32_t>(mask.mask_heads)),
            .head = static_cast<int>(pair % static_cast<uint32_t>(mask.mask_heads))};
  }
};

// The flags of a plane's mask tiles.
struct PlaneFlags {
  const MaskIterations& mask;
  const ListPlane& plane;

  __device__ __forceinline__ int tile(int key_tile, int query_tile) const {
    return mask.tile(mask.first_tile(plane.batch, plane.head, key_tile), query_tile);
  }
  __device__ __forceinline__ int flags(int key_tile, int query_tile) const {
    return mask.tiles[tile(key_tile, query_tile)];
  }
  __device__ __forceinline__ bool is_left(int key_tile, int query_tile) const {
    return (flags(key_tile, query_tile) & MaskIterations::kSomeTrue) != 0;
  }
};

// Grid: a CTA per plane and kThreads / 32 query tiles. A warp goes through the contributors of a query tile in the
// order of their ranks, and counts those that are left.
__global__ void __launch_bounds__(kThreads) ranks_kernel(const __grid_constant__ KeyStationaryArguments args) {
  constexpr int kWarps = kThreads / kWarpSize;
  ptx::wait_for_kernel_before();
  ptx::allow_dependent_launch();
  const MaskIterations& mask = args.mask;
  const auto rounds = static_cast<uint32_t>(LoopOrder::num_tiles(mask.query_tiles, kWarps));
  const uint32_t plane_index = blockIdx.x / rounds;
  const ListPlane plane = ListPlane::of(args, plane_index);
  const int query_tile = static_cast<int>(blockIdx.x % rounds) * kWarps + static_cast<int>(threadIdx.x) / kWarpSize;
  const attention::Sequence sequence = args.params.sequences.at(plane.batch);
  if (sequence.num_keys == 0 || query_tile >= LoopOrder::num_tiles(sequence.num_queries, kQueries)) return;
  const PlaneFlags tiles = {mask, plane};
  const LoopOrder::Contributor own = args.order.contributor(args.params.visibility, sequence, 0, plane.direction);
  const LoopOrder::Tiles contributors = own.contributors(query_tile);
  uint16_t* const ranks = mask.ranks + (int64_t{plane_index} * mask.key_tiles) * mask.query_tiles + query_tile;
  const int count = contributors.end - contributors.begin;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  int before = 0;
  int last = -1;
  for (int first = 0; first < count; first += kWarpSize) {
    const int rank = first + lane;
    const int key_tile = rank < count ? own.key_tile_of_rank(query_tile, contributors, rank) : 0;
    const bool is_left = rank < count && tiles.is_left(key_tile, query_tile);
    const uint32_t left = __ballot_sync(0xFFFFFFFFu, is_left);
    if (is_left) {
      last = key_tile;
      ranks[int64_t{key_tile} * mask.query_tiles] = static_cast<uint16_t>(before + __popc(left & ((1u << lane) - 1)));
    }
    if (left != 0) last = __shfl_sync(0xFFFFFFFFu, last, 31 - __clz(static_cast<int>(left)));
    before += __popc(left);
  }
  __syncwarp();
  if (lane != 0) return;
  // In a descending pair, key tiles wait for each other at the last query tile that they share.
  if (query_tile + 1 == LoopOrder::num_tiles(sequence.num_queries, kQueries) &&
      plane.direction != LoopDirection::kAscending)
    mask.descends[mask.plane(plane.batch, plane.head)] = 2 * before >= LoopOrder::num_tiles(sequence.num_keys, kKeys);
  if (last >= 0) ranks[int64_t{last} * mask.query_tiles] |= MaskIterations::kIsLast;
  // Most warps find as many there already, and atomic operations on one word come one after the other.
  if (before > *static_cast<volatile int*>(mask.most_contributors)) atomicMax(mask.most_contributors, before);
}

// The list of a key tile. It has a thread for each iteration.
struct IterationList {
  const KeyStationaryArguments& args;
  const attention::Sequence sequence;
  const LoopOrder::Contributor own;
  const PlaneFlags tiles;

  // Returns how many iterations are left.
  __device__ __forceinline__ int write(MaskIterations::Entry* entries, const uint16_t* ranks) const {
    __shared__ int counts[kThreads / kWarpSize];
    if (own.tile >= LoopOrder::num_tiles(sequence.num_keys, kKeys) || sequence.num_queries == 0) return 0;
    const LoopOrder::Tiles visible_query_tiles =
        LoopOrder::visible_query_tiles(args.params.visibility, sequence, own.tile);
    const int iterations = visible_query_tiles.end - visible_query_tiles.begin;
    const auto warp = static_cast<int>(threadIdx.x) / kWarpSize;
    const auto lane = static_cast<int>(threadIdx.x) % kWarpSize;
    int written = 0;
    for (int first_of_round = 0; first_of_round < iterations; first_of_round += kThreads) {
      const int i = first_of_round + static_cast<int>(threadIdx.x);
      const int query_tile = MaskIterations::query_tile(own, visible_query_tiles, i);
      const int flags = i < iterations ? tiles.flags(own.tile, query_tile) : 0;
      const bool is_left = (flags & MaskIterations::kSomeTrue) != 0;
      const uint32_t left = __ballot_sync(0xFFFFFFFFu, is_left);
      if (lane == 0) counts[warp] = __popc(left);
      __syncthreads();
      int index = written + __popc(left & ((1u << lane) - 1));
      for (int w = 0; w < kThreads / kWarpSize; ++w) {
        index += w < warp ? counts[w] : 0;
        written += counts[w];
      }
      __syncthreads();
      if (!is_left) continue;
      const uint16_t rank = ranks[query_tile];
      // Without a mask or intervals there are no bits to look at.
      const bool has_masked = (flags & MaskIterations::kSomeFalse) != 0 && (mask().has_words || mask().intervals > 0);
      MaskIterations::Entry entry = {
          .query_tile = query_tile,
          .rank = rank & (MaskIterations::kIsLast - 1),
          .is_last = (rank & MaskIterations::kIsLast) != 0,
          .is_hidden = {},
          .mask_tile = has_masked ? tiles.tile(own.tile, query_tile) : MaskIterations::Entry::kNothingMasked};
      hide_by_blocks(entry);
      entries[index] = entry;
    }
    return written;
  }

 private:
  __device__ __forceinline__ const MaskIterations& mask() const { return tiles.mask; }

  __device__ __forceinline__ void hide_by_blocks(MaskIterations::Entry& entry) const {
    const attention::BlockMask& blocks = args.params.score_mod.blocks;
    if (!blocks.present()) return;
    const uint8_t* const row = blocks.row(tiles.plane.batch, tiles.plane.head, int64_t{entry.query_tile} * kQueries);
    constexpr int kWarpgroupKeys = kKeys / LoopOrder::kKeyWarpgroups;
#pragma unroll
    for (int w = 0; w < LoopOrder::kKeyWarpgroups; ++w) {
      entry.is_hidden[w] = !blocks.sees(row, own.tile * kKeys + w * kWarpgroupKeys);
    }
  }
};

// Grid: a CTA per list.
__global__ void __launch_bounds__(kThreads)
    iteration_lists_kernel(const __grid_constant__ KeyStationaryArguments args) {
  ptx::wait_for_kernel_before();
  ptx::allow_dependent_launch();
  const MaskIterations& mask = args.mask;
  const uint32_t plane_index = blockIdx.x / static_cast<uint32_t>(mask.key_tiles);
  const auto tile = static_cast<int>(blockIdx.x - plane_index * static_cast<uint32_t>(mask.key_tiles));
  const ListPlane plane = ListPlane::of(args, plane_index);
  const attention::Sequence sequence = args.params.sequences.at(plane.batch);
  const LoopOrder::Contributor own = args.order.contributor(args.params.visibility, sequence, tile, plane.direction);
  const uint32_t first = mask.first_entry(blockIdx.x);
  const int count = IterationList{args, sequence, own, {mask, plane}}.write(mask.entries + first, mask.ranks + first);
  if (threadIdx.x == 0) mask.counts[blockIdx.x] = count;
}

}  // namespace

cudaError_t list_mask_iterations(const KeyStationaryArguments& args, cudaStream_t stream) {
  const MaskIterations& mask = args.mask;
  if (!mask.present()) return cudaSuccess;
  cudaError_t error = mask.has_words ? pack_words(args, stream) : scan_selected_keys(args, stream);
  if (error != cudaSuccess) return error;
  const int64_t planes = mask.num_lists() / mask.key_tiles;
  const int64_t rounds = LoopOrder::num_tiles(mask.query_tiles, kThreads / kWarpSize);
  error = common::launch_early(ranks_kernel, {.blocks = planes * rounds, .threads = kThreads}, stream, args);
  if (error != cudaSuccess) return error;
  return common::launch_early(iteration_lists_kernel, {.blocks = mask.num_lists(), .threads = kThreads}, stream, args);
}

}  // namespace flash_attn_ext::sm90
