// The arguments of the split-KV kernel, beyond those that every backend gets.
#pragma once

#include "attention/append.h"
#include "kernels/common/rows/merged_row.cuh"
#include "kernels/schedule/stream_k.cuh"

namespace flash_attn_ext::sm80 {

struct SplitParams : attention::AppendingForwardParams {
  StreamK stream_k;
  common::SplitRows splits;
  TileSplits* work_tiles;  // one for each work tile
};

}  // namespace flash_attn_ext::sm80
