// Writes the table of key tiles, in the order in which CTAs fetch them, and clears counters of the backward kernel. It
// has a thread for each entry.
#include <algorithm>

#include "kernels/common/launch/launch_early.cuh"
#include "kernels/sm90/backward/key_stationary/arguments.h"
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
    if (index < num_sums(args)) {
      for (int warpgroup = 0; warpgroup < LoopOrder::kKeyWarpgroups; ++warpgroup)
        workspace.arrivals[index * LoopOrder::kKeyWarpgroups + warpgroup] = 0;
    }
    if (index >= args.order.num_work_tiles()) return;
    workspace.table[index] = work_of(index);
    static_assert(4 * LoopOrder::kKeyWarpgroups == sizeof(uint64_t));  // a flag per warp
    if (index >= args.order.pairs / args.order.kv_group_shares * args.order.tiles) return;
    reinterpret_cast<uint64_t*>(workspace.dkdv_nan_flags)[index] = 0;
  }

  // How many key tiles have partial dK and dV of several shares.
  FLASH_HOST_DEVICE static uint32_t num_sums(const KeyStationaryArguments& args) {
    if (args.order.kv_group_shares == 1) return 0;
    return static_cast<uint32_t>(args.params.num_heads_k) *
           static_cast<uint32_t>(KeyStationaryWorkspace::key_tiles_of_head(args.params));
  }

 private:
  __device__ __forceinline__ KeyTileWork work_of(uint32_t index) const {
    const attention::BackwardParams& p = args.params;
    const LoopOrder::WorkTile work_tile = args.order.work_tile(index);
    const auto heads = static_cast<uint32_t>(p.num_heads_k);
    const uint32_t key_pair = work_tile.pair / args.order.kv_group_shares;
    const uint32_t batch = key_pair / heads;
    const attention::Sequence sequence = p.sequences.at(batch);
    KeyTileWork work = {};
    work.batch = static_cast<int>(batch);
    work.key_head = static_cast<int>(key_pair - batch * heads);
    work.heads = static_cast<int>(p.queries_per_key_head()) / static_cast<int>(args.order.kv_group_shares);
    work.kv_group_share = static_cast<int>(work_tile.pair - key_pair * args.order.kv_group_shares);
    work.number = work.key_head * KeyStationaryWorkspace::key_tiles_of_head(p) +
                  KeyStationaryWorkspace::first_key_tile(p, sequence) + work_tile.tile;
    work.phase_end = static_cast<int>(work_tile.phase_end);
    work.query_begin = static_cast<int>(sequence.query_begin);
    work.key_begin = static_cast<int>(sequence.key_begin);
    work.contributor = args.order.contributor(p.visibility, sequence, work_tile.tile, work_tile.direction);
    work.first_accumulator =
        args.order.accumulator_of(KeyStationaryWorkspace::first_tile(p, sequence), work.contributor.phase());
    if (work_tile.tile >= LoopOrder::num_tiles(sequence.num_keys, LoopOrder::kKeys) || sequence.num_queries == 0) {
      return work;
    }
    const LoopOrder::Tiles visible_query_tiles = LoopOrder::visible_query_tiles(p.visibility, sequence, work_tile.tile);
    work.begin = visible_query_tiles.begin;
    work.end = visible_query_tiles.end;
    work.iterations = count_iterations(work, visible_query_tiles);
    work.first = work_tile.direction == LoopDirection::kCyclic       ? work.contributor.first_of_cycle()
                 : work_tile.direction == LoopDirection::kDescending ? visible_query_tiles.end - 1
                                                                     : visible_query_tiles.begin;
    for (int w = 0; w < LoopOrder::kKeyWarpgroups; ++w) {
      work.own[w] = seen_by(sequence, work_tile.tile * LoopOrder::kKeys + w * kWarpgroupKeys);
    }
    return work;
  }

  __device__ __forceinline__ int count_iterations(const KeyTileWork& work,
                                                  const LoopOrder::Tiles& visible_query_tiles) const {
    if (!args.mask.present())
      return visible_query_tiles.empty() ? 0 : (visible_query_tiles.end - visible_query_tiles.begin) * work.heads;
    const int first_head =
        work.key_head * static_cast<int>(args.params.queries_per_key_head()) + work.kv_group_share * work.heads;
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

// The next kernel reads results of the kernels before this one as soon as it starts. So this kernel waits for those
// before it allows the next one to start.
__global__ void __launch_bounds__(kThreads) list_kernel(const __grid_constant__ KeyStationaryArguments args) {
  ptx::wait_for_kernel_before();
  ptx::allow_dependent_launch();
  KeyTileList{args}.run(blockIdx.x * kThreads + threadIdx.x);
}

}  // namespace

cudaError_t list_key_tiles(const KeyStationaryArguments& args, cudaStream_t stream) {
  const uint32_t entries = std::max(args.order.num_work_tiles(), KeyTileList::num_sums(args));
  const unsigned blocks = (entries + kThreads - 1) / kThreads;
  return common::launch_early(list_kernel, {.blocks = blocks, .threads = kThreads}, stream, args);
}

}  // namespace flash_attn_ext::sm90
