// The dynamic tile scheduler of a CTA: one thread fetches work tiles and publishes which tiles of keys each one sees.
#pragma once

#include "kernels/schedule/block.cuh"
#include "kernels/schedule/head_tiles.h"
#include "kernels/sm90/bias_mask.cuh"
#include "kernels/sm90/forward/packed_rows.cuh"
#include "kernels/sm90/forward/traits.h"
#include "kernels/sm90/tile_scheduler.cuh"
#include "ptx/dependent_launch.h"

namespace flash_attn_ext::sm90 {

// Whether the mask hides all, some or nothing of a tile of keys.
struct ScannedTile {
  MaskCoverage coverage;
  int next;  // of a hidden tile: the first one in descending order that may not be hidden, or -1
};

// All loads are in flight at once, since the producer thread waits for them between two TMA loads.
template <class Traits>
__device__ __forceinline__ ScannedTile scan_of(const attention::AttentionParams& p,
                                               const typename ForwardShared<Traits>::Work& work, int tile) {
  using attention::MaskTiles;
  constexpr int kSize = static_cast<int>(MaskTiles::kSize);
  constexpr int kKeys = Traits::kConfig.block_n;
  static_assert(kSize == tile::kWarpgroupRows && (kKeys % 32 == 0 || !Traits::kConfig.has_bias_or_mask()));
  constexpr int kColumns = (kKeys + kSize - 1) / kSize;  // also where tiles of keys are not aligned to the mask's
  if (!p.score_mod.mask_tiles.present()) return {MaskCoverage::kAll, -1};
  const attention::Sequence& sequence = work.coord.sequence;
  const int last_row = (static_cast<int>(sequence.num_queries) - 1) / kSize;
  const int last_column = (min((tile + 1) * kKeys, static_cast<int>(sequence.num_keys)) - 1) / kSize;
  uint32_t found = 0;
  uint32_t hidden_before = MaskTiles::kAllBefore;
#pragma unroll
  for (int w = 0; w < Traits::kConfig.warpgroups; ++w) {
    const auto row = MaskTileRow::of(p.score_mod.mask_tiles, static_cast<int>(sequence.batch),
                                     static_cast<int>(work.coord.head), min(work.first_query / kSize + w, last_row));
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const uint32_t flags = __ldg(row.data + min(tile * kKeys / kSize + j, last_column) * row.key_stride);
      found |= flags;
      if (j == 0) hidden_before = min(hidden_before, flags >> MaskTiles::kHiddenBeforeShift);
    }
  }
  if ((found & MaskTiles::kSomeTrue) == 0) {
    const int first_hidden =  // of the mask's tiles
        tile * kKeys / kSize - static_cast<int>(MaskTiles::decode_hidden_before(hidden_before));
    const bool all_before = hidden_before == MaskTiles::kAllBefore || first_hidden <= 0;
    return {MaskCoverage::kNone, all_before ? -1 : (first_hidden * kSize + kKeys - 1) / kKeys - 1};
  }
  return {(found & MaskTiles::kSomeFalse) == 0 ? MaskCoverage::kAll : MaskCoverage::kMixed, -1};
}

// The first tile of keys, from n in descending order, that the mask does not hide completely.
template <class Traits>
__device__ __forceinline__ MainloopTile unmasked_from(const attention::AttentionParams& p,
                                                      const typename ForwardShared<Traits>::Work& work, int n) {
  if constexpr (Traits::kConfig.has_bias_or_mask()) {
#pragma unroll 1
    while (n >= work.begin) {
      const ScannedTile scanned = scan_of<Traits>(p, work, n);
      if (scanned.coverage != MaskCoverage::kNone) return {n, scanned.coverage == MaskCoverage::kMixed};
      n = scanned.next;
    }
    return {work.begin - 1, false};
  }
  return {n, false};
}

template <class Traits>
struct ForwardScheduler {
  using Shared = ForwardShared<Traits>;
  using Work = typename Shared::Work;

  const typename Traits::Arguments& args;
  Shared& shared;
  typename decltype(Shared::work_pipeline)::State work_state{};
  int fetch_parity = 0;

  // Called by a warp, of which one thread continues.
  __device__ __forceinline__ void start() {
    bool has_tiles = true;
    if (!Traits::kConfig.takes_entries_without_interval() && args.intervals.present()) {
      ptx::allow_dependent_launch();  // the scan of the mask is complete
      has_tiles = args.intervals.any(/*with_interval=*/true);
    }
    if (tile::lane() == 0) run(has_tiles ? static_cast<int>(blockIdx.x) : INT32_MAX);
  }

 private:
  __device__ __forceinline__ void run(int first) {
    const uint32_t count = args.existing_tiles.num_work_tiles(args.schedule.num_blocks);
    int last = -1;
#pragma unroll 1
    for (int index = first; index < static_cast<int>(count);
         index = static_cast<int>(fetch_work_tile(args.work_counter, count))) {
      const int tile = args.existing_tiles.at(static_cast<uint32_t>(index));
      if (!publish(WorkKind::kTile, tile)) continue;
      args.flags.previous[tile] = last;
      last = tile;
      // Fetching earlier would spoil the longest-first order.
      ptx::wait(shared.may_fetch_work, fetch_parity);
      fetch_parity ^= 1;
    }
    if constexpr (Traits::kKeepsFirstMaximum) {
      publish_flagged(last);
    } else {
      publish_control(WorkKind::kEnd, last);
    }
  }

  // Publishes the CTA's flagged work tiles again, after every work tile was processed once. The result depends only on
  // the work tile, not on the CTA's other ones.
  __device__ __forceinline__ void publish_flagged(int last) {
    publish_control(WorkKind::kAllProcessed, last);
    if (!shared.wait_for_flags()) return;
#pragma unroll 1
    for (int tile = last; tile >= 0; tile = args.flags.previous[tile]) {
      if (!is_flagged(tile)) continue;
      publish(WorkKind::kAgain, tile);
    }
    publish_control(WorkKind::kEnd, last);
  }

  __device__ __forceinline__ bool is_flagged(int tile) const {
    const uint8_t* flags = args.flags.flags + int64_t{tile} * Traits::kWarps;
    for (int warp = 0; warp < Traits::kWarps; ++warp) {
      if (flags[warp] != 0) return true;
    }
    return false;
  }

  __device__ __forceinline__ Work& next_work() {
    shared.work_pipeline.producer_acquire(work_state);
    return shared.work[work_state.stage];
  }
  __device__ __forceinline__ void commit_work() {
    ptx::arrive(shared.work_pipeline.full[work_state.stage]);
    work_state.advance();
  }
  __device__ __forceinline__ void publish_control(WorkKind kind, int last_tile) {
    Work& work = next_work();
    work.kind = kind;
    work.tile = last_tile;
    commit_work();
  }

  // Returns false for a work tile past the end of its sequence, or of a batch entry that another launch computes.
  __device__ __forceinline__ bool publish(WorkKind kind, int tile) {
    Work& work = next_work();
    locate(work, tile);
    if (work.first_query >= num_rows_of<Traits>(args, work.coord.sequence)) return false;
    if (!args.intervals.narrow(work.coord.sequence, work.first_query,
                               !Traits::kConfig.takes_entries_without_interval()))
      return false;
    work.kind = kind;
    find_ranges(work);
    if constexpr (Traits::kConfig.has_bias_or_mask())
      work.end = unmasked_from<Traits>(args.params, work, work.end - 1).tile + 1;
    commit_work();
    return true;
  }

  __device__ __forceinline__ void find_ranges(Work& work) const {
    const attention::Sequence& sequence = work.coord.sequence;
    const attention::Visibility& visibility = args.params.visibility;
    const auto num_rows = static_cast<int>(num_rows_of<Traits>(args, sequence));
    int begin = INT32_MAX;
    int end = 0;
#pragma unroll 1
    for (int w = 0; w < Shared::kWarpgroups; ++w) {
      const int first = work.first_query + w * tile::kWarpgroupRows;
      const int last = min(first + tile::kWarpgroupRows, num_rows) - 1;
      TileRange own = tile_range<Traits::kConfig.block_n, unsigned>(
          visibility.keys_of<int>(query_of<Traits>(args, first), sequence),
          visibility.keys_of<int>(query_of<Traits>(args, last), sequence));
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
    // O of packed heads goes through their rows of Q, which are loaded with a tile of keys.
    if (Traits::kConfig.may_pack_heads() && !Traits::kConfig.split_kv) work.end = max(end, work.begin + 1);
    if constexpr (Traits::kConfig.split_kv) restrict_to_split(work);
  }

  // Restricts the tiles of keys to those of the CTA's split.
  __device__ __forceinline__ void restrict_to_split(Work& work) const {
    const int count = work.end - work.begin;
    const int begin = work.begin + count * work.split / args.kv_splits.count;
    const int end = work.begin + count * (work.split + 1) / args.kv_splits.count;
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

  // Writes to shared memory, since this thread has few registers.
  __device__ __forceinline__ void locate(Work& work, int tile) const {
    const Place at = args.schedule.place(static_cast<uint32_t>(tile));
    work.tile = tile;
    auto slice = static_cast<int>(at.slice);
    if constexpr (Traits::kConfig.split_kv) {
      work.split = slice % args.kv_splits.count;
      slice /= args.kv_splits.count;
    }
    work.first_column = slice * kColumns;
    work.first_query = static_cast<int>(first_query_of(args.schedule, at, Traits::kQueries));
    work.coord = {sequence_of<Traits>(args, at.batch), first_head_of<Traits>(args, at), at.key_head};
    __threadfence_block();
  }
};

}  // namespace flash_attn_ext::sm90
