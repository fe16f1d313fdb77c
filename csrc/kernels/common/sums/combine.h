// The combine kernel of split-KV: merges the splits of rows.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/params.h"
#include "kernels/common/rows/merged_row.cuh"
#include "kernels/schedule/stream_k.cuh"

namespace flash_attn_ext::common {

struct CombineParams : attention::ForwardParams {
  RowTiles tiles;
  SplitRows splits;
  const TileSplits* work_tiles = nullptr;  // null: work tile i has the slots from i * splits_of_work_tile on
  int splits_of_work_tile = 0;
  int slot_step = 1;  // between the slots of a work tile, from its second split on
  uint32_t num_work_tiles = 0;
  KnownWorkList known = {};   // if present, the splits of a work tile follow from it
  Divisor rows_of_work_tile;  // at most
  int warps_per_row = 1;      // a CTA's warps share a row where rows are few and have many splits
  bool warms_up = false;      // whether the kernel executes its code once before it waits for the split-KV kernel
};

// Launches the combine kernel. Where the GPU supports programmatic dependent launch, it starts before the kernel that
// writes the splits has ended. Element: of the output. Instantiated for bfloat16, float16 and float32, and for 64, 128
// and 256 columns.
template <class Element, int kColumns>
cudaError_t combine(const CombineParams& params, cudaStream_t stream);

}  // namespace flash_attn_ext::common
