// The thread that decides what a block works on: it claims tiles of queries and says which tiles of keys each one sees.
#pragma once

#include "kernels/schedule/block.cuh"
#include "kernels/schedule/tile_range.cuh"
#include "kernels/sm90/forward/arguments.h"
#include "kernels/sm90/forward/traits.h"
#include "kernels/sm90/mask_tile_row.h"
#include "ptx/dependent_launch.h"

namespace flash_attn_ext::sm90 {

// What the mask leaves of a tile of keys. All bytes of it are on their way at once: the thread that starts copies waits
// for them between two of these.
template <class Traits>
__device__ __forceinline__ MaskCoverage coverage_of(const attention::AttentionParams& p,
                                                    const typename ForwardShared<Traits>::Work& work, int tile) {
  using attention::MaskTiles;
  constexpr int kSize = static_cast<int>(MaskTiles::kSize);
  constexpr int kKeys = Traits::kTile.keys;
  static_assert(kSize == tile::kWarpgroupRows && (kKeys % 32 == 0 || !Traits::kHasTerms));
  constexpr int kColumns = (kKeys + kSize - 1) / kSize;  // also of tiles that begin within one of the mask's
  if (!p.score_mod.mask_tiles.present()) return MaskCoverage::kAll;
  const attention::Sequence& sequence = work.item.sequence;
  const int last_row = (static_cast<int>(sequence.num_queries) - 1) / kSize;
  const int last_column = (min((tile + 1) * kKeys, static_cast<int>(sequence.num_keys)) - 1) / kSize;
  uint32_t found = 0;
#pragma unroll
  for (int w = 0; w < Traits::kTile.warpgroups; ++w) {
    const auto row = MaskTileRow::of(p.score_mod.mask_tiles, static_cast<int>(sequence.batch),
                                     static_cast<int>(work.item.head), min(work.first_query / kSize + w, last_row));
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      found |= __ldg(row.data + min(tile * kKeys / kSize + j, last_column) * row.key_stride);
    }
  }
  if ((found & MaskTiles::kSomeTrue) == 0) return MaskCoverage::kNone;
  return (found & MaskTiles::kSomeFalse) == 0 ? MaskCoverage::kAll : MaskCoverage::kMixed;
}

// The first tile of keys from n down of which the mask leaves anything.
template <class Traits>
__device__ __forceinline__ Visit visit_from(const attention::AttentionParams& p,
                                            const typename ForwardShared<Traits>::Work& work, int n) {
  return next_attended<-1, Traits::kHasTerms>(n, work.begin - 1,
                                              [&](int tile) { return coverage_of<Traits>(p, work, tile); });
}

template <class Traits>
struct ForwardScheduler {
  using Shared = ForwardShared<Traits>;
  using Work = typename Shared::Work;

  const ForwardArguments& args;
  Shared& shared;
  typename decltype(Shared::work_ring)::Position work_at{};
  int claim_parity = 0;

  // By a warp, one thread of which goes on.
  __device__ __forceinline__ void start() {
    bool has_tiles = true;
    if (!Traits::kHasTerms && args.intervals.present()) {
      ptx::allow_dependent_launch();  // the scan has ended
      has_tiles = args.intervals.any(/*with_interval=*/true);
    }
    if (tile::lane() == 0) run(has_tiles ? static_cast<int>(blockIdx.x) : INT32_MAX);
  }

 private:
  __device__ __forceinline__ void run(int first) {
    int last = -1;
#pragma unroll 1
    for (int tile = first; tile < static_cast<int>(args.schedule.num_blocks); tile = claim()) {
      if (!publish(WorkKind::kTile, tile)) continue;
      args.notes.previous[tile] = last;
      last = tile;
      // An early claim would spoil the order, longest first.
      ptx::wait(shared.may_claim, claim_parity);
      claim_parity ^= 1;
    }
    if constexpr (Traits::kFixesReference) {
      publish_flagged(last);
    } else {
      announce(WorkKind::kEnd, last);
    }
  }

  // Each tile leads to one claim, and the last one leaves the counter as it was.
  __device__ __forceinline__ int claim() const {
    const uint32_t count = atomicAdd(args.claims, 1u);
    if (count + 1 == args.schedule.num_blocks) *args.claims = 0;
    return static_cast<int>(gridDim.x + count);
  }

  // The block's tiles in which a sum left its range, once all have had their turn. What comes out depends on the tile
  // alone, not on which others the block had.
  __device__ __forceinline__ void publish_flagged(int last) {
    announce(WorkKind::kAllPassed, last);
    if (!shared.wait_for_flags()) return;
#pragma unroll 1
    for (int tile = last; tile >= 0; tile = args.notes.previous[tile]) {
      if (!is_flagged(tile)) continue;
      publish(WorkKind::kAgain, tile);
    }
    announce(WorkKind::kEnd, last);
  }

  __device__ __forceinline__ bool is_flagged(int tile) const {
    const uint8_t* flags = args.notes.flags + int64_t{tile} * Traits::kWarps;
    for (int warp = 0; warp < Traits::kWarps; ++warp) {
      if (flags[warp] != 0) return true;
    }
    return false;
  }

  __device__ __forceinline__ Work& next_work() {
    shared.work_ring.wait_empty(work_at);
    return shared.work[work_at.stage];
  }
  __device__ __forceinline__ void commit_work() {
    ptx::arrive(shared.work_ring.full[work_at.stage]);
    work_at.advance();
  }
  __device__ __forceinline__ void announce(WorkKind kind, int last_tile) {
    Work& work = next_work();
    work.kind = kind;
    work.tile = last_tile;
    commit_work();
  }

  // False, and nothing to do, for a tile behind its sequence's end, or of another launch's batch entry.
  __device__ __forceinline__ bool publish(WorkKind kind, int tile) {
    Work& work = next_work();
    locate(work, tile);
    if (work.first_query >= work.item.sequence.num_queries) return false;
    if (!args.intervals.take(work.item.sequence, work.first_query, !Traits::kHasTerms)) return false;
    work.kind = kind;
    find_ranges(work);
    if constexpr (Traits::kHasTerms) work.end = visit_from<Traits>(args.params, work, work.end - 1).tile + 1;
    commit_work();
    return true;
  }

  __device__ __forceinline__ void find_ranges(Work& work) const {
    const attention::Sequence& sequence = work.item.sequence;
    const attention::Visibility& visibility = args.params.visibility;
    const auto num_queries = static_cast<int>(sequence.num_queries);
    int begin = INT32_MAX;
    int end = 0;
#pragma unroll 1
    for (int w = 0; w < Shared::kWarpgroups; ++w) {
      const int first = work.first_query + w * tile::kWarpgroupRows;
      const int last = min(first + tile::kWarpgroupRows, num_queries) - 1;
      const attention::Interval last_sees = visibility.keys_of<int>(last, sequence);
      TileRange own = tile_range<Traits::kTile.keys, unsigned>(visibility.keys_of<int>(first, sequence), last_sees);
      if constexpr (Traits::kHalvesFirst) {
        work.sees_half[w] = own.end * Traits::kTile.keys - static_cast<int>(last_sees.end) >= Traits::kTile.keys / 2;
      }
      if (first > last || own.empty()) {
        own = {INT32_MAX, INT32_MAX, 0, 0};
      } else {
        begin = min(begin, own.begin);
        end = max(end, own.end);
      }
      work.own[w] = own;
    }
    work.begin = min(begin, end);
    work.end = end;
    if constexpr (Traits::kDividesKeys) take_part(work);
  }

  // Of the tiles of keys, those of the block's part.
  __device__ __forceinline__ void take_part(Work& work) const {
    const int count = work.end - work.begin;
    const int begin = work.begin + count * work.part / args.key_parts.count;
    const int end = work.begin + count * (work.part + 1) / args.key_parts.count;
#pragma unroll 1
    for (int w = 0; w < Shared::kWarpgroups; ++w) {
      TileRange& own = work.own[w];
      own.begin = max(own.begin, begin);
      own.end = min(own.end, end);
      if (own.empty()) own = {INT32_MAX, INT32_MAX, 0, 0};
    }
    work.begin = begin;
    work.end = end;
  }

  // In shared memory, not in registers: the thread has few.
  __device__ __forceinline__ void locate(Work& work, int tile) const {
    const Place at = args.schedule.place(static_cast<uint32_t>(tile));
    work.tile = tile;
    auto slice = static_cast<int>(at.slice);
    if constexpr (Traits::kDividesKeys) {
      work.part = slice % args.key_parts.count;
      slice /= args.key_parts.count;
    }
    work.first_column = slice * kColumns;
    work.first_query = static_cast<int>(first_query_of(args.schedule, at, Traits::kQueries));
    work.item = {args.params.sequences.at(at.batch), at.key_head * args.schedule.group + at.head_of_group, at.key_head};
    __threadfence_block();
  }
};

}  // namespace flash_attn_ext::sm90
