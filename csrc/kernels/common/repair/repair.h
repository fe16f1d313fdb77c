// Recomputes rows for which tensor cores produced a NaN, without them (attention_rows.cuh): the NaN may be 0 times a
// NaN or infinity that the row does not attend to. A kernel reads the non-finite flags that the tensor-core kernels
// have set, one per warp. Almost always no flag is set, and then the kernel takes no longer than its launch, which
// overlaps the preceding kernel where the GPU supports it.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/params.h"
#include "kernels/schedule/schedule.cuh"

namespace flash_attn_ext::common {

// Which rows the warps of a launch own, and which of them have a NaN.
struct FlaggedRows {
  const uint8_t* flags = nullptr;  // one per warp: CTAs of the schedule x warps
  Schedule schedule = {};          // without CTAs: no rows
  int warps = 1;                   // per CTA
  int rows_per_warp = 0;           // consecutive queries or keys
  int columns = 0;                 // of the result, per slice

  FLASH_HOST_DEVICE uint32_t num_flags() const { return schedule.num_blocks * static_cast<uint32_t>(warps); }
};

// The rows of a launch whose flags stand in the order of heads: one head after the other, whatever the order of its
// work tiles: without L2 to share (l2_bytes is 0), make_schedule takes one head at a time. A warp owns rows_per_warp of
// the tile_rows of a tile, and has all columns of the result.
inline FlaggedRows rows_in_order_of_heads(const attention::AttentionParams& p, const uint8_t* flags,
                                          flash_attn_ext::Rows rows, int tile_rows, int rows_per_warp) {
  const Division division = {
      .pairs = all_pairs(p), .rows = rows, .tile_rows = tile_rows, .slices = 1, .element_bytes = 1, .l2_bytes = 0};
  return {.flags = flags,
          .schedule = make_schedule(p, division),
          .warps = tile_rows / rows_per_warp,
          .rows_per_warp = rows_per_warp,
          .columns = INT32_MAX};
}

// A tile's index in that order, for keys of a pair and for queries of a head. The head is pair * group + head of the
// group. A schedule has the last queries first (schedule/block.cuh).
FLASH_HOST_DEVICE int64_t flag_index(int64_t pair, int tiles, int tile) { return pair * tiles + tile; }
FLASH_HOST_DEVICE int64_t query_flag_index(int64_t head, int tiles, int tile) {
  return head * tiles + tiles - 1 - tile;
}

// Recomputes flagged rows of O and the LSE.
template <class Element>
cudaError_t repair_forward(const attention::ForwardParams& params, const FlaggedRows& rows, cudaStream_t stream);
// Recomputes flagged rows of dQ, and of dK and dV, in one launch.
template <class Element>
cudaError_t repair_gradients(const attention::BackwardParams& params, const FlaggedRows& queries,
                             const FlaggedRows& keys, cudaStream_t stream);

}  // namespace flash_attn_ext::common
