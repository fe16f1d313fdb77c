// Joins the parts of rows whose keys were divided among blocks.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/params.h"
#include "kernels/common/rows/merged_row.cuh"
#include "kernels/schedule/key_division.cuh"

namespace flash_attn_ext::common {

struct CombineParams : attention::ForwardParams {
  RowTiles tiles;
  PartRows parts;
  const ItemParts* items = nullptr;  // null: item i has the slots from i * parts_of_item on
  int parts_of_item = 0;
  int slot_step = 1;  // from an item's second part on
  uint32_t num_items = 0;
  KnownLine known = {};    // present: which parts an item has follows from it
  Divisor rows_of_item;    // at most
  int warps_per_row = 1;   // several, a block, where rows are few and have many parts
  bool rehearses = false;  // goes through its instructions once before it waits
};

// Queues the kernel behind the one that wrote the parts; it starts before that one has ended where the GPU can do so.
// Element: of the output. Instantiated for bfloat16, float16 and float32, and for 64, 128 and 256 columns.
template <class Element, int kColumns>
cudaError_t combine(const CombineParams& params, cudaStream_t stream);

}  // namespace flash_attn_ext::common
