// The table of tiles of keys in the order of claims, and zeros where blocks meet. A thread per entry.
#include <algorithm>

#include "kernels/common/launch_early.cuh"
#include "kernels/sm90/backward/key_tile_list.h"
#include "ptx/dependent_launch.h"

namespace flash_attn_ext::sm90 {
namespace {

constexpr int kThreads = 64;
constexpr int kPartKeys = VisitOrder::kKeys / VisitOrder::kParts;

struct KeyTileList {
  const BackwardArguments& args;

  __device__ __forceinline__ void run(uint32_t index) const {
    const BackwardWorkspace& workspace = args.workspace;
    if (index == 0) *workspace.claims = 0;
    if (index < num_sums(args)) {
      for (int part = 0; part < VisitOrder::kParts; ++part) workspace.arrivals[index * VisitOrder::kParts + part] = 0;
    }
    if (index >= args.order.num_claims()) return;
    workspace.table[index] = work_of(index);
    static_assert(4 * VisitOrder::kParts == sizeof(uint64_t));  // a flag per warp
    if (index >= args.order.pairs / args.order.members * args.order.tiles) return;
    reinterpret_cast<uint64_t*>(workspace.dkdv_nan_flags)[index] = 0;
  }

  // Tiles of keys of which claims leave parts of dK and dV.
  FLASH_HOST_DEVICE static uint32_t num_sums(const BackwardArguments& args) {
    if (args.order.members == 1) return 0;
    return static_cast<uint32_t>(args.params.num_heads_k) *
           static_cast<uint32_t>(BackwardWorkspace::key_tiles_of_head(args.params));
  }

 private:
  __device__ __forceinline__ KeyTileWork work_of(uint32_t index) const {
    const attention::BackwardParams& p = args.params;
    const VisitOrder::Claim claim = args.order.claim(index);
    const auto heads = static_cast<uint32_t>(p.num_heads_k);
    const uint32_t key_pair = claim.pair / args.order.members;
    const uint32_t batch = key_pair / heads;
    const attention::Sequence sequence = p.sequences.at(batch);
    KeyTileWork work = {};
    work.batch = static_cast<int>(batch);
    work.key_head = static_cast<int>(key_pair - batch * heads);
    work.heads = static_cast<int>(p.queries_per_key_head()) / static_cast<int>(args.order.members);
    work.member = static_cast<int>(claim.pair - key_pair * args.order.members);
    work.number = work.key_head * BackwardWorkspace::key_tiles_of_head(p) +
                  BackwardWorkspace::first_key_tile(p, sequence) + claim.tile;
    work.group_end = static_cast<int>(claim.group_end);
    work.query_begin = static_cast<int>(sequence.query_begin);
    work.key_begin = static_cast<int>(sequence.key_begin);
    work.visitor = args.order.visitor(p.visibility, sequence, claim.tile, claim.walk);
    work.first_sums = args.order.sums_of(BackwardWorkspace::first_tile(p, sequence), work.visitor.phase());
    if (claim.tile >= VisitOrder::num_tiles(sequence.num_keys, VisitOrder::kKeys) || sequence.num_queries == 0) {
      return work;
    }
    const VisitOrder::Tiles visited = VisitOrder::visited(p.visibility, sequence, claim.tile);
    work.begin = visited.begin;
    work.end = visited.end;
    work.visits = count_visits(work, visited);
    work.first = claim.walk == Walk::kCycle     ? work.visitor.first_of_cycle()
                 : claim.walk == Walk::kDescend ? visited.end - 1
                                                : visited.begin;
    for (int w = 0; w < VisitOrder::kParts; ++w) {
      work.own[w] = seen_by(sequence, claim.tile * VisitOrder::kKeys + w * kPartKeys);
    }
    return work;
  }

  __device__ __forceinline__ int count_visits(const KeyTileWork& work, const VisitOrder::Tiles& visited) const {
    if (!args.mask.present()) return visited.empty() ? 0 : (visited.end - visited.begin) * work.heads;
    const int first_head =
        work.key_head * static_cast<int>(args.params.queries_per_key_head()) + work.member * work.heads;
    int visits = 0;
    for (int head = first_head; head < first_head + work.heads; ++head) {
      visits += args.mask.counts[args.mask.list(work.batch, head, work.visitor.walk, work.visitor.tile)];
    }
    return visits;
  }

  // The tiles of queries that see a part's keys, of which some may not be there: then none sees it whole.
  __device__ __forceinline__ TileRange seen_by(const attention::Sequence& sequence, int first) const {
    const attention::Visibility& visibility = args.params.visibility;
    const int end = static_cast<int>(min(int64_t{first} + kPartKeys, sequence.num_keys));
    if (first >= end) return {0, 0, 0, 0};
    TileRange range = tile_range<VisitOrder::kQueries, uint32_t>(visibility.queries_of<int>(first, sequence),
                                                                 visibility.queries_of<int>(end - 1, sequence));
    if (end < first + kPartKeys) range.full_begin = range.full_end = 0;
    return range;
  }
};

// Whoever comes next reads what came before, too, and at once: it may not start before that is there.
__global__ void __launch_bounds__(kThreads) list_kernel(const __grid_constant__ BackwardArguments args) {
  ptx::wait_for_kernel_before();
  ptx::allow_dependent_launch();
  KeyTileList{args}.run(blockIdx.x * kThreads + threadIdx.x);
}

}  // namespace

cudaError_t list_key_tiles(const BackwardArguments& args, cudaStream_t stream) {
  const uint32_t entries = std::max(args.order.num_claims(), KeyTileList::num_sums(args));
  const unsigned blocks = (entries + kThreads - 1) / kThreads;
  return common::launch_early(list_kernel, {.blocks = blocks, .threads = kThreads}, stream, args);
}

}  // namespace flash_attn_ext::sm90
