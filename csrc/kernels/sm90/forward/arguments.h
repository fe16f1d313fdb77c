// What a forward kernel is told, beside what the host tells every backend.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "kernels/common/rows/merged_row.cuh"
#include "kernels/schedule/key_intervals.cuh"
#include "kernels/schedule/schedule.cuh"
#include "kernels/sm90/tensor_map.h"

namespace flash_attn_ext::sm90 {

// Which tiles a block worked on, so that it can look again at those in which something went wrong: a linked list.
struct TileNotes {
  int* previous;   // of each tile of the schedule: the one before it in the same block, or -1
  uint8_t* flags;  // one per tile and warp
};

// Where the tiles of queries leave multiprocessors idle, `count` blocks share the keys of each: Parts kernels.
struct KeyParts {
  int count = 1;
  int column_slices = 1;  // of a tile's O
  int tiles = 1;          // of a head's queries
  common::PartRows rows;  // a slot for each tile, slice and part
};

struct ForwardArguments {
  OperandMap q;
  OperandMap k;
  OperandMap v;
  OperandMap bias;  // of BiasMask kernels
  OutputMap out;
  attention::ForwardParams params;
  Schedule schedule;
  TileNotes notes;
  KeyParts key_parts;
  uint32_t* claims;  // 0 when the kernel starts and when it ends: how many tiles were claimed
  KeyIntervals intervals;
};

}  // namespace flash_attn_ext::sm90
