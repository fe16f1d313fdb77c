// What a kernel whose tile of keys holds all keys of a sequence is told, and what its blocks work on.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "kernels/schedule/key_intervals.cuh"
#include "kernels/schedule/schedule.cuh"
#include "kernels/schedule/work_item.h"
#include "kernels/sm90/tensor_map.h"
#include "tile/sm90/gemm.h"

namespace flash_attn_ext::sm90 {

struct AllKeysArguments {
  OperandMap q;
  OperandMap k;
  OperandMap v;
  OutputMap out;
  attention::ForwardParams params;
  Schedule schedule;  // of units: up to `query_tiles` tiles of 64 queries of a head
  int query_tiles;
  uint8_t* nan_flags;  // of each tile of 64 queries, one per warp
  KeyIntervals intervals;
  float scale_log2e;  // scale * log2(e)
};

struct Unit {
  int number;  // in the schedule
  int first_query;
  int query_tiles;  // 0: all of its queries are behind the sequence's end, or its batch entry is another launch's
  WorkItem item;
};

// In shared memory, or in registers where there are enough.
__device__ __forceinline__ void locate(Unit& unit, const AllKeysArguments& args, int number) {
  const Place at = args.schedule.place(static_cast<uint32_t>(number));
  const int rows = args.query_tiles * tile::kWarpgroupRows;
  unit.number = number;
  unit.first_query = static_cast<int>(at.tile) * rows;
  unit.item = {args.params.sequences.at(at.batch), at.key_head * args.schedule.group + at.head_of_group, at.key_head};
  const bool taken = args.intervals.take(unit.item.sequence, unit.first_query, /*with_interval=*/true);
  const int left = taken ? static_cast<int>(unit.item.sequence.num_queries) - unit.first_query : 0;
  unit.query_tiles = (min(max(left, 0), rows) + tile::kWarpgroupRows - 1) / tile::kWarpgroupRows;
}

// A block's units, as alike as their sequences: nobody claims them.
template <class Function>
__device__ __forceinline__ void for_each_unit(const AllKeysArguments& args, Function&& function) {
  const auto count = static_cast<int>(args.schedule.num_blocks);
#pragma unroll 1
  for (int number = static_cast<int>(blockIdx.x); number < count; number += static_cast<int>(gridDim.x)) {
    function(number);
  }
}

}  // namespace flash_attn_ext::sm90
