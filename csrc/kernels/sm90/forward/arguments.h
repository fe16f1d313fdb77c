// What a forward kernel is told, beside what the host tells every backend.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "kernels/common/rows/merged_row.cuh"
#include "kernels/schedule/key_intervals.cuh"
#include "kernels/schedule/schedule.cuh"
#include "kernels/sm90/tensor_map.h"

namespace flash_attn_ext::sm90 {

// A linked list of the work tiles of each CTA, so that it can recompute those whose flag is set.
struct TileFlags {
  int* previous;   // for each work tile, the one that the same CTA had before it, or -1
  uint8_t* flags;  // one per work tile and warp
};

// Split-KV: where the tiles of queries leave SMs idle, `count` CTAs share the keys of each tile.
struct KvSplits {
  int count = 1;
  int column_slices = 1;   // of a tile's O
  int tiles = 1;           // of a head's queries
  common::SplitRows rows;  // a slot for each tile, slice and split
};

struct ForwardArguments {
  TmaDescriptor q;
  TmaDescriptor k;
  TmaDescriptor v;
  TmaDescriptor bias;  // only of kernels for a bias and a mask
  OutputMap out;
  attention::ForwardParams params;
  Schedule schedule;
  TileFlags flags;
  KvSplits kv_splits;
  uint32_t* work_counter;  // how many work tiles were fetched; 0 when the kernel starts and when it ends
  KeyIntervals intervals;
};

}  // namespace flash_attn_ext::sm90
