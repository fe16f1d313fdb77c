// Arguments of the two-pass backward kernels, beside what the host tells every backend, and the workspace through which
// these kernels hand results on.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "kernels/schedule/schedule.cuh"
#include "kernels/schedule/score_tiles.h"
#include "kernels/sm90/tensor_map.h"

namespace flash_attn_ext::sm90 {

// Statistics are in tiles of queries. The tiles of a head are consecutive, and so are the heads. A packed sequence
// begins at a tile of its own.
struct TwoPassWorkspace {
  float* statistics;  // for each tile: its queries' LSEs, their deltas, the residuals of the LSEs (QueryTileStatistics)
  void* scores;       // materialised tiles of P, then those of dS (ScoreTiles)
  uint8_t* dq_nan_flags;
  uint8_t* dkdv_nan_flags;
  uint32_t* work_counters;  // two for each launch: of the dQ kernel and of the GEMM kernel
  float* key_sums;          // for each key tile of a launch: partial dK / scale or dV of earlier query chunks
  int key_tiles_of_matrix;
  int tiles_of_head;
  int num_work_tiles;

  __device__ __forceinline__ static int first_tile(const attention::AttentionParams& p,
                                                   const attention::Sequence& sequence) {
    const auto batch = static_cast<int>(sequence.batch);
    if (p.sequences.cu_seqlens_q != nullptr) return static_cast<int>(sequence.query_begin) / ScoreTiles::kRows + batch;
    return batch * ScoreTiles::num_tiles(p.sequences.max_seqlen_q);
  }
  __device__ __forceinline__ float* statistics_of(int64_t tile) const {
    return statistics + tile * ScoreTiles::kStatistics * ScoreTiles::kRows;
  }
  // The flag of a warp's 16 rows of a query tile. Flags are in the order of a schedule of all queries, one head after
  // the other (schedule/block.cuh).
  template <class Work>
  __device__ __forceinline__ uint8_t& dq_nan_flag(const attention::AttentionParams& p, const Work& work, int tile,
                                                  int warp) const {
    const int tiles = ScoreTiles::num_tiles(p.sequences.max_seqlen_q);
    const int64_t pair = int64_t{work.key_head} * p.batch + work.batch;
    const int64_t row_of_tiles = pair * p.queries_per_key_head() + work.head_of_group;
    return dq_nan_flags[(row_of_tiles * tiles + tiles - 1 - tile) * 4 + warp];
  }
};

// Which gradients the GEMM kernel computes: dK, dV or both. A work tile computes one of them.
struct WantedGradients {
  bool dk;
  bool dv;
  FLASH_HOST_DEVICE int count() const { return dk + dv; }
};

struct TwoPassArguments {
  TmaDescriptor q;  // all TMA boxes have ScoreTiles::kRows rows
  TmaDescriptor k;
  TmaDescriptor v;
  TmaDescriptor dout;
  TmaDescriptor bias;  // only of kernels for a bias and a mask
  attention::BackwardParams params;
  TwoPassWorkspace workspace;
  ScoreTiles tiles;
  Schedule schedule;        // of this kernel launch
  uint32_t* work_counters;  // of this kernel launch; 0 when it starts
  WantedGradients wanted;
  float scale_log2e;  // scale * log2(e)
  bool scales_lse;    // statistics hold LSE * log2(e), because scores are only scaled, or also hidden by a mask
};

}  // namespace flash_attn_ext::sm90
