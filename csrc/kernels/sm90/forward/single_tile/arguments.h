// The arguments of a single-tile kernel, and the work tiles of its persistent CTAs.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "kernels/schedule/key_intervals.cuh"
#include "kernels/schedule/schedule.cuh"
#include "kernels/schedule/work_item.h"
#include "kernels/sm90/tensor_map.h"
#include "tile/sm90/gemm.h"

namespace flash_attn_ext::sm90 {

struct SingleTileArguments {
  TmaDescriptor q;
  TmaDescriptor k;
  TmaDescriptor v;
  OutputMap out;
  attention::ForwardParams params;
  Schedule schedule;  // of work tiles: up to `query_tiles` tiles of 64 queries of a head
  int query_tiles;
  uint8_t* nan_flags;  // one per warp of each tile of 64 queries
  KeyIntervals intervals;
  float scale_log2e;  // scale * log2(e)
};

struct WorkTile {
  int number;  // in the schedule
  int first_query;
  int query_tiles;  // 0: past the end of the sequence, or of a batch entry that another launch computes
  WorkItem item;
};

// Written to shared memory, or to registers where there are enough.
__device__ __forceinline__ void locate(WorkTile& work_tile, const SingleTileArguments& args, int number) {
  const Place at = args.schedule.place(static_cast<uint32_t>(number));
  const int rows = args.query_tiles * tile::kWarpgroupRows;
  work_tile.number = number;
  work_tile.first_query = static_cast<int>(at.tile) * rows;
  work_tile.item = {args.params.sequences.at(at.batch), at.key_head * args.schedule.group + at.head_of_group,
                    at.key_head};
  const bool taken = args.intervals.narrow(work_tile.item.sequence, work_tile.first_query, /*with_interval=*/true);
  const int left = taken ? static_cast<int>(work_tile.item.sequence.num_queries) - work_tile.first_query : 0;
  work_tile.query_tiles = (min(max(left, 0), rows) + tile::kWarpgroupRows - 1) / tile::kWarpgroupRows;
}

// Calls function(number) for each of a CTA's work tiles. Work tiles cost the same, so the scheduler is static.
template <class Function>
__device__ __forceinline__ void for_each_work_tile(const SingleTileArguments& args, Function&& function) {
  const auto count = static_cast<int>(args.schedule.num_blocks);
#pragma unroll 1
  for (int number = static_cast<int>(blockIdx.x); number < count; number += static_cast<int>(gridDim.x)) {
    function(number);
  }
}

}  // namespace flash_attn_ext::sm90
