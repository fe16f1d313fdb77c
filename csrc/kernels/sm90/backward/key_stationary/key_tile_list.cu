// Writes the table of key tiles, in the order in which CTAs fetch them, and clears counters of the backward kernel. It
// has a thread for each entry, and for each counter. With a mask, and room for parts, divide_kernel runs before it, and
// decides which key tiles are divided.
#include <algorithm>

#include "kernels/common/launch/launch_early.cuh"
#include "kernels/sm90/backward/key_stationary/arguments.h"
#include "kernels/sm90/backward/key_stationary/sampled_lists.cuh"
#include "ptx/dependent_launch.h"

namespace flash_attn_ext::sm90 {
namespace {

constexpr int kThreads = 64;
constexpr int kWarpgroupKeys = LoopOrder::kKeys / LoopOrder::kKeyWarpgroups;

struct KeyTileList {
  const KeyStationaryArguments& args;

  __device__ __forceinline__ void run(uint32_t index) const {
    const KeyStationaryWorkspace& workspace = args.workspace;
    if (index == 0) *workspace.work_counter = 0;
    clear_arrivals(index);
    clear_nan_flags(index);
    if (index >= args.num_work_tiles()) return;
    KeyTileWork& entry = static_cast<KeyTileWork*>(workspace.table)[index];
    const int in_order = args.existing_tiles.at(index);
    if (in_order == ExistingTiles::kNone) {
      entry.batch = KeyTileWork::kEnd;
      return;
    }
    const LoopOrder::WorkTile work_tile = directed(args.order.work_tile(static_cast<uint32_t>(in_order)));
    entry = work_of(work_tile);
    if (args.existing_tiles.present()) {
      const int key_tiles = LoopOrder::num_tiles(entry.contributor.num_keys, LoopOrder::kKeys);
      entry.phase_end = ExistingTiles::end_of_phase(args.order, work_tile, key_tiles, index);
    }
  }

  static uint32_t num_threads(const KeyStationaryArguments& args) {
    return std::max({args.num_work_tiles(), num_sums(args), num_key_tiles(args)});
  }

  __device__ __forceinline__ void clear_arrivals(uint32_t index) const {
    if (index < num_sums(args)) {
      for (int warpgroup = 0; warpgroup < LoopOrder::kKeyWarpgroups; ++warpgroup)
        args.workspace.arrivals[index * LoopOrder::kKeyWarpgroups + warpgroup] = 0;
    }
  }
  __device__ __forceinline__ void clear_nan_flags(uint32_t index) const {
    static_assert(4 * LoopOrder::kKeyWarpgroups == sizeof(uint64_t));  // a flag per warp
    if (index >= num_key_tiles(args)) return;
    reinterpret_cast<uint64_t*>(args.workspace.dkdv_nan_flags)[index] = 0;
  }

  // How many key tiles have partial dK and dV of several shares.
  FLASH_HOST_DEVICE static uint32_t num_sums(const KeyStationaryArguments& args) {
    if (args.order.kv_group_shares == 1) return 0;
    return static_cast<uint32_t>(args.params.num_heads_k) *
           static_cast<uint32_t>(KeyStationaryWorkspace::key_tiles_of_head(args.params));
  }
  // The key tiles of all key heads, if all sequences have as many.
  FLASH_HOST_DEVICE static uint32_t num_key_tiles(const KeyStationaryArguments& args) {
    return static_cast<uint32_t>(args.params.batch) * static_cast<uint32_t>(args.params.num_heads_k) * args.order.tiles;
  }

  // Turns a descending pair into an ascending one, where the mask asks for it.
  __device__ __forceinline__ LoopOrder::WorkTile directed(const LoopOrder::WorkTile& work_tile) const {
    if (!args.mask.present() || work_tile.direction != LoopDirection::kDescending) return work_tile;
    const attention::BackwardParams& p = args.params;
    const uint32_t shares = args.order.kv_group_shares;  // a pair is one of a key head
    const uint32_t pairs = static_cast<uint32_t>(p.num_heads_k) * shares;
    const uint32_t batch = work_tile.pair / pairs;
    if (p.sequences.at(batch).num_queries == 0) return work_tile;  // there is no last query tile that says
    const uint32_t head = (work_tile.pair - batch * pairs) * (static_cast<uint32_t>(p.queries_per_key_head()) / shares);
    const bool descends = args.mask.descends[args.mask.plane(static_cast<int>(batch), static_cast<int>(head))] != 0;
    return descends ? work_tile : args.order.ascending(work_tile);
  }

  __device__ __forceinline__ KeyTileWork work_of(const LoopOrder::WorkTile& work_tile) const {
    const attention::BackwardParams& p = args.params;
    const auto heads = static_cast<uint32_t>(p.num_heads_k);
    const uint32_t key_pair = work_tile.pair / args.order.kv_group_shares;
    const uint32_t batch = key_pair / heads;
    const attention::Sequence sequence = args.sequence(batch);
    KeyTileWork work = {};
    work.batch = static_cast<int>(batch);
    work.key_head = static_cast<int>(key_pair - batch * heads);
    work.heads = args.order.heads_of_share(static_cast<int>(p.queries_per_key_head()));
    work.kv_group_share = static_cast<int>(work_tile.pair - key_pair * args.order.kv_group_shares);
    work.index = work.key_head * KeyStationaryWorkspace::key_tiles_of_head(p) +
                 KeyStationaryWorkspace::first_key_tile(p, sequence) + work_tile.tile;
    work.phase_end = static_cast<int>(work_tile.phase_end);
    work.query_begin = static_cast<int>(sequence.query_begin);
    work.key_begin = static_cast<int>(sequence.key_begin);
    work.contributor =
        args.order.contributor(p.visibility, sequence, work_tile.tile, work_tile.direction, work.kv_group_share);
    work.first_accumulator =
        args.order.accumulator_of(KeyStationaryWorkspace::first_tile(p, sequence), work.contributor.phase());
    if (work_tile.tile >= LoopOrder::num_tiles(sequence.num_keys, LoopOrder::kKeys) || sequence.num_queries == 0) {
      return work;
    }
    const LoopOrder::Tiles visible_query_tiles = LoopOrder::visible_query_tiles(p.visibility, sequence, work_tile.tile);
    const LoopOrder::Tiles of_share = args.order.query_tiles_of_share(
        LoopOrder::num_tiles(sequence.num_queries, LoopOrder::kQueries), work.kv_group_share);
    work.begin = max(visible_query_tiles.begin, of_share.begin);
    work.end = min(visible_query_tiles.end, of_share.end);
    work.iterations = count_iterations(work);
    work.first = first_of(work);
    for (int w = 0; w < LoopOrder::kKeyWarpgroups; ++w) {
      TileRange& own = work.own[w] = seen_by(sequence, work_tile.tile * LoopOrder::kKeys + w * kWarpgroupKeys);
      own.begin = max(own.begin, work.begin);
      own.end = min(own.end, work.end);
    }
    return work;
  }

  // The query tile at which the loop starts.
  __device__ __forceinline__ static int first_of(const KeyTileWork& work) {
    switch (work.contributor.direction) {
      case LoopDirection::kCyclic:
        return work.contributor.first_of_cycle();
      case LoopDirection::kDescending:
        return work.end - 1;
      default:
        return work.begin;
    }
  }

 private:
  __device__ __forceinline__ int count_iterations(const KeyTileWork& work) const {
    if (!args.mask.present()) return max(work.end - work.begin, 0) * work.heads;
    const int first_head = work.first_head(static_cast<int>(args.params.queries_per_key_head()));
    int iterations = 0;
    for (int head = first_head; head < first_head + work.heads; ++head) {
      iterations +=
          args.mask.counts[args.mask.list(work.batch, head, work.contributor.direction, work.contributor.tile)];
    }
    return iterations;
  }

  // The query tiles that see the keys of a warpgroup. If some of the keys do not exist, no query tile sees all of them.
  __device__ __forceinline__ TileRange seen_by(const attention::Sequence& sequence, int first) const {
    const attention::Visibility& visibility = args.params.visibility;
    const int end = static_cast<int>(min(int64_t{first} + kWarpgroupKeys, sequence.num_keys));
    if (first >= end) return {0, 0, 0, 0};
    TileRange range = tile_range<LoopOrder::kQueries, uint32_t>(visibility.queries_of<int>(first, sequence),
                                                                visibility.queries_of<int>(end - 1, sequence));
    if (end < first + kWarpgroupKeys) range.full_begin = range.full_end = 0;
    return range;
  }
};

// What divide_kernel writes, behind the table: how key tiles are divided into parts. A key tile has iterations for each
// share of its KV group. All parts of all shares have partial sums where one share is divided.
struct KeyTileDivision {
  struct Header {
    uint32_t head_group_pairs;  // of the order of work tiles
    uint32_t entries;           // of the table, with parts
    KeyTileParts parts;
  };

  const LoopOrder& order;
  Header* header;
  int* iterations;         // of each pair's key tiles
  uint16_t* parts_before;  // of each work tile: the sum of (parts - 1) over the work tiles before it
  uint16_t* sums_before;   // of each key tile (key_tile()): the sum of its predecessors' partial sums

  __device__ __forceinline__ static KeyTileDivision of(const KeyStationaryArguments& args) {
    auto* const header =
        reinterpret_cast<Header*>(static_cast<MaskedKeyTileWork*>(args.workspace.table) + num_masked_work_tiles(args));
    auto* const iterations = reinterpret_cast<int*>(header + 1);
    auto* const parts_before = reinterpret_cast<uint16_t*>(iterations + args.order.num_work_tiles());
    return {args.order, header, iterations, parts_before, parts_before + args.order.num_work_tiles()};
  }

  __device__ __forceinline__ int& iterations_of(const LoopOrder::WorkTile& work_tile) const {
    return iterations[work_tile.pair * order.tiles + static_cast<uint32_t>(work_tile.tile)];
  }

  __device__ __forceinline__ uint32_t num_key_tiles() const { return order.num_work_tiles() / order.kv_group_shares; }
  // A key tile's index among these.
  __device__ __forceinline__ uint32_t key_tile(const LoopOrder::WorkTile& work_tile) const {
    return work_tile.pair / order.kv_group_shares * order.tiles + static_cast<uint32_t>(work_tile.tile);
  }
  // How many parts the first shares of a key tile have.
  __device__ __forceinline__ int parts_of_shares(const KeyTileParts& parts, uint32_t key_tile, uint32_t shares) const {
    const uint32_t key_pair = key_tile / order.tiles;
    const int* const of_share =
        iterations + key_pair * order.kv_group_shares * order.tiles + key_tile - key_pair * order.tiles;
    int count = 0;
    for (uint32_t share = 0; share < shares; ++share) count += parts.count(of_share[share * order.tiles]);
    return count;
  }
  // The partial sums of a key tile of which something is divided; 0: nothing is.
  __device__ __forceinline__ int sums(const KeyTileParts& parts, uint32_t key_tile) const {
    const int count = parts_of_shares(parts, key_tile, order.kv_group_shares);
    return count > static_cast<int>(order.kv_group_shares) ? count : 0;
  }
};
static_assert(sizeof(KeyTileDivision::Header) + sizeof(int) + 2 * sizeof(uint16_t) == KeyTileParts::division_bytes(1));

// Writes the division. It has one CTA, which goes through the work tiles several times.
struct KeyTileDivider {
  static constexpr int kDividerThreads = 1024;
  static constexpr int kWarpSize = 32;
  static constexpr int kWarps = kDividerThreads / kWarpSize;

  const KeyStationaryArguments& args;
  const KeyTileDivision division;
  const uint32_t ctas;

  __device__ __forceinline__ void run() const {
    const LoopOrder order = SampledLists{args}.order();
    const KeyTileList list = {args};
    const uint32_t work_tiles = order.num_work_tiles();
    unsigned long long own_total = 0;
    unsigned long long own_tiles = 0;
    for (uint32_t index = threadIdx.x; index < work_tiles; index += kDividerThreads) {
      const LoopOrder::WorkTile work_tile = list.directed(order.work_tile(index));
      const int iterations = list.work_of(work_tile).iterations;
      division.iterations_of(work_tile) = iterations;
      own_total += static_cast<unsigned long long>(iterations);
      own_tiles += iterations > 0 ? 1 : 0;
    }
    const auto total = static_cast<int64_t>(sum(own_total));
    KeyTileParts parts = KeyTileParts::of(total, static_cast<int64_t>(sum(own_tiles)), ctas);
    while (count_sums(parts) > args.mask.part_sums) parts.iterations *= 2;
    exclusive_sum(division.num_key_tiles(), division.sums_before,
                  [&](uint32_t key_tile) { return division.sums(parts, key_tile); });
    const uint32_t more = exclusive_sum(work_tiles, division.parts_before, [&](uint32_t index) {
      return parts.count(division.iterations_of(list.directed(order.work_tile(index)))) - 1;
    });
    if (threadIdx.x == 0) *division.header = {order.head_group_pairs, work_tiles + more, parts};
  }

 private:
  // The sum over all threads.
  __device__ __forceinline__ static unsigned long long sum(unsigned long long own) {
    __shared__ unsigned long long of_warps[kWarps];
#pragma unroll
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) own += __shfl_xor_sync(0xFFFFFFFFu, own, distance);
    __syncthreads();  // all threads have read the sums of the call before
    if (threadIdx.x % kWarpSize == 0) of_warps[threadIdx.x / kWarpSize] = own;
    __syncthreads();
    unsigned long long all = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) all += of_warps[warp];
    return all;
  }

  __device__ __forceinline__ int64_t count_sums(const KeyTileParts& parts) const {
    unsigned long long own = 0;
    for (uint32_t key_tile = threadIdx.x; key_tile < division.num_key_tiles(); key_tile += kDividerThreads) {
      own += static_cast<unsigned long long>(division.sums(parts, key_tile));
    }
    return static_cast<int64_t>(sum(own));
  }

  // An exclusive prefix sum: before[i] is number_of(0) + ... + number_of(i - 1). Returns the total.
  template <class Number>
  __device__ __forceinline__ static uint32_t exclusive_sum(uint32_t count, uint16_t* before, Number&& number_of) {
    __shared__ uint32_t of_warps[kWarps];
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    uint32_t before_round = 0;
    for (uint32_t first = 0; first < count; first += kDividerThreads) {
      const uint32_t i = first + threadIdx.x;
      const auto own = static_cast<uint32_t>(i < count ? number_of(i) : 0);
      uint32_t to_lane = own;
#pragma unroll
      for (int distance = 1; distance < kWarpSize; distance *= 2) {
        const uint32_t other = __shfl_up_sync(0xFFFFFFFFu, to_lane, distance);
        if (lane >= distance) to_lane += other;
      }
      __syncthreads();  // all threads have read the sums of the round before
      if (lane == kWarpSize - 1) of_warps[warp] = to_lane;
      __syncthreads();
      uint32_t before_warp = before_round;
      for (int w = 0; w < kWarps; ++w) {
        before_warp += w < warp ? of_warps[w] : 0;
        before_round += of_warps[w];
      }
      if (i < count) before[i] = static_cast<uint16_t>(before_warp + to_lane - own);
    }
    return before_round;
  }
};

// The table where there is a mask. It has a thread for each work tile, and one for each entry that parts may take.
struct MaskedKeyTileList {
  const KeyStationaryArguments& args;

  __device__ __forceinline__ void run(uint32_t index) const {
    if (index == 0) *args.workspace.work_counter = 0;
    clear_arrivals(index);
    KeyTileList{args}.clear_nan_flags(index);
    if (args.mask.part_sums > 0) {
      list_parts(index, KeyTileDivision::of(args));
    } else {
      const LoopOrder order = SampledLists{args}.order();
      if (index < order.num_work_tiles()) table()[index] = whole(work_of(work_tile(order, index)));
    }
  }

  static uint32_t num_threads(const KeyStationaryArguments& args) {
    return std::max(num_masked_work_tiles(args), num_counters(args));
  }

 private:
  __device__ __forceinline__ MaskedKeyTileWork* table() const {
    return static_cast<MaskedKeyTileWork*>(args.workspace.table);
  }
  __device__ __forceinline__ LoopOrder::WorkTile work_tile(const LoopOrder& order, uint32_t index) const {
    return KeyTileList{args}.directed(order.work_tile(index));
  }
  __device__ __forceinline__ KeyTileWork work_of(const LoopOrder::WorkTile& work_tile) const {
    return KeyTileList{args}.work_of(work_tile);
  }

  // Of shares, then of key tiles that are divided.
  FLASH_HOST_DEVICE static uint32_t num_counters(const KeyStationaryArguments& args) {
    return KeyTileList::num_sums(args) + static_cast<uint32_t>(args.mask.part_sums);
  }
  __device__ __forceinline__ void clear_arrivals(uint32_t index) const {
    if (index >= num_counters(args)) return;
    for (int warpgroup = 0; warpgroup < LoopOrder::kKeyWarpgroups; ++warpgroup)
      args.workspace.arrivals[index * LoopOrder::kKeyWarpgroups + warpgroup] = 0;
  }

  // A work tile of which nothing is divided, of a key tile that is not divided.
  __device__ __forceinline__ MaskedKeyTileWork whole(const KeyTileWork& work) const {
    const auto shares = static_cast<int>(args.order.kv_group_shares);
    if (shares == 1) return {work, 0, 0, 0, 0, 1};
    return {work,
            0,
            work.index * shares,
            work.index,
            static_cast<uint16_t>(work.kv_group_share),
            static_cast<uint16_t>(shares)};
  }

  __device__ __forceinline__ void list_parts(uint32_t index, const KeyTileDivision& division) const {
    const KeyTileDivision::Header header = *division.header;
    if (index >= header.entries && index < num_masked_work_tiles(args)) table()[index].batch = KeyTileWork::kEnd;
    if (index >= args.order.num_work_tiles()) return;
    LoopOrder order = args.order;
    order.head_group_pairs = header.head_group_pairs;
    const LoopOrder::WorkTile at = work_tile(order, index);
    const KeyTileWork work = work_of(at);
    MaskedKeyTileWork* const entries = table() + index + division.parts_before[index];
    const uint32_t key_tile = division.key_tile(at);
    const int sums = division.sums(header.parts, key_tile);
    if (sums == 0) {
      *entries = whole(work);
      return;
    }
    const uint32_t sums_of_shares = KeyTileList::num_sums(args);
    const uint32_t sums_before = division.sums_before[key_tile];
    const int first = division.parts_of_shares(header.parts, key_tile, static_cast<uint32_t>(work.kv_group_share));
    const int count = header.parts.count(work.iterations);
    MaskedKeyTileWork part = {work,
                              0,
                              static_cast<int>(sums_of_shares * args.order.kv_group_shares + sums_before),
                              static_cast<int>(sums_of_shares + sums_before),
                              0,
                              static_cast<uint16_t>(sums)};
    for (int i = 0; i < count; ++i) {
      part.partial = static_cast<uint16_t>(first + i);
      part.first_iteration = KeyTileParts::first(work.iterations, i, count);
      part.iterations = KeyTileParts::first(work.iterations, i + 1, count) - part.first_iteration;
      entries[i] = part;
    }
  }
};

// The same for a launch of query chunks.
struct ChunkedKeyTileList {
  const ChunkedKeyStationaryArguments& args;

  __device__ __forceinline__ void run(uint32_t index) const {
    const KeyTileList list = {args};
    if (index == 0) *args.workspace.work_counter = 0;
    if (args.is_first) {
      list.clear_arrivals(index);
      list.clear_nan_flags(index);
    }
    if (index >= args.num_work_tiles()) return;
    LoopOrder::WorkTile work_tile = args.order.work_tile(index, args.key_tiles);
    const uint32_t partial_sums = work_tile.pair * args.order.tiles + static_cast<uint32_t>(work_tile.tile);
    work_tile.pair += args.first_pair;
    ChunkedKeyTileWork work = {list.work_of(work_tile)};
    if (work_tile.tile < static_cast<int>(args.order.tiles)) chunk(partial_sums, work);
    static_cast<ChunkedKeyTileWork*>(args.workspace.table)[index] = work;
  }

  static uint32_t num_threads(const ChunkedKeyStationaryArguments& args) {
    const uint32_t entries = args.num_work_tiles();
    return args.is_first ? std::max({entries, KeyTileList::num_sums(args), KeyTileList::num_key_tiles(args)}) : entries;
  }

 private:
  // Restricts a key tile to the chunk. Tiles past the last one, which fill the phases, have no partial sums.
  __device__ __forceinline__ void chunk(uint32_t partial_sums, ChunkedKeyTileWork& work) const {
    work.partial_sums = static_cast<int>(partial_sums);
    const QueryChunks::Part part = args.chunks.part(args.launch, work.contributor, {work.begin, work.end});
    work.has_partial_sums = part.has_partial_sums;
    work.gradients = part.is_last  ? ChunkedKeyTileWork::Gradients::kWritten
                     : part.exists ? ChunkedKeyTileWork::Gradients::kPartial
                                   : ChunkedKeyTileWork::Gradients::kNone;
    if (work.iterations > 0) iterate_over(part, work);
  }

  __device__ __forceinline__ static void iterate_over(const QueryChunks::Part& part, ChunkedKeyTileWork& work) {
    const int origin = part.first_query_tile;
    work.contributor = part.contributor;
    work.first_query_tile = origin;
    work.query_begin += origin * LoopOrder::kQueries;
    work.first_accumulator += origin;
    work.begin = part.query_tiles.begin;
    work.end = part.query_tiles.end;
    work.iterations = part.query_tiles.empty() ? 0 : (work.end - work.begin) * work.heads;
    work.first = KeyTileList::first_of(work);
    for (TileRange& own : work.own) {
      own = {max(own.begin - origin, work.begin), min(own.end - origin, work.end), own.full_begin - origin,
             own.full_end - origin};
    }
  }
};

// The next kernel reads results of the kernels before this one as soon as it starts. So this kernel waits for those
// before it allows the next one to start.
template <class List, class Arguments>
__global__ void __launch_bounds__(kThreads) list_kernel(const __grid_constant__ Arguments args) {
  ptx::wait_for_kernel_before();
  ptx::allow_dependent_launch();
  List{args}.run(blockIdx.x * kThreads + threadIdx.x);
}

__global__ void __launch_bounds__(KeyTileDivider::kDividerThreads, 1)
    divide_kernel(const __grid_constant__ KeyStationaryArguments args, uint32_t ctas) {
  ptx::wait_for_kernel_before();
  ptx::allow_dependent_launch();
  KeyTileDivider{args, KeyTileDivision::of(args), ctas}.run();
}

template <class List, class Arguments>
cudaError_t launch_list(const Arguments& args, uint32_t entries, cudaStream_t stream) {
  const unsigned blocks = (entries + kThreads - 1) / kThreads;
  return common::launch_early(list_kernel<List, Arguments>, {.blocks = blocks, .threads = kThreads}, stream, args);
}

}  // namespace

cudaError_t list_key_tiles(const KeyStationaryArguments& args, cudaStream_t stream) {
  if (args.mask.present()) return launch_list<MaskedKeyTileList>(args, MaskedKeyTileList::num_threads(args), stream);
  return launch_list<KeyTileList>(args, KeyTileList::num_threads(args), stream);
}

cudaError_t divide_key_tiles(const KeyStationaryArguments& args, int64_t ctas, cudaStream_t stream) {
  if (args.mask.part_sums == 0) return cudaSuccess;
  return common::launch_early(divide_kernel, {.blocks = 1, .threads = KeyTileDivider::kDividerThreads}, stream, args,
                              static_cast<uint32_t>(ctas));
}

cudaError_t list_key_tiles(const ChunkedKeyStationaryArguments& args, cudaStream_t stream) {
  return launch_list<ChunkedKeyTileList>(args, ChunkedKeyTileList::num_threads(args), stream);
}

}  // namespace flash_attn_ext::sm90
