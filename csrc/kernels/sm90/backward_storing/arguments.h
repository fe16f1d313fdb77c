// What the backward kernels that store P and dS are told, beside what the host tells every backend, and where they
// meet.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "kernels/plan/score_tiles.h"
#include "kernels/schedule/schedule.cuh"
#include "kernels/sm90/tensor_map.h"

namespace flash_attn_ext::sm90 {

// Statistics are laid out in tiles of queries: those of a head come one after the other, the heads likewise. A packed
// sequence begins at a tile of its own.
struct StoringWorkspace {
  float* statistics;  // of each tile: LSE of its queries, delta, what the LSE left out (QueryTileStatistics)
  void* scores;       // tiles of P, then of dS (ScoreTiles)
  uint8_t* dq_nan_flags;
  uint8_t* dkdv_nan_flags;
  uint32_t* claims;  // of each launch, two counters
  float* key_sums;   // of each tile of keys of a launch: dK / scale or dV of the bands before
  int key_tiles_of_matrix;
  int tiles_of_head;
  int num_claims;

  __device__ __forceinline__ static int first_tile(const attention::AttentionParams& p,
                                                   const attention::Sequence& sequence) {
    const auto batch = static_cast<int>(sequence.batch);
    if (p.sequences.cu_seqlens_q != nullptr) return static_cast<int>(sequence.query_begin) / ScoreTiles::kRows + batch;
    return batch * ScoreTiles::num_tiles(p.sequences.max_seqlen_q);
  }
  __device__ __forceinline__ float* statistics_of(int64_t tile) const {
    return statistics + tile * ScoreTiles::kStatistics * ScoreTiles::kRows;
  }
  // Of a warp's 16 rows of a tile of queries, in the order of a schedule of all queries, one head after the other
  // (schedule/block.cuh).
  template <class Work>
  __device__ __forceinline__ uint8_t& dq_nan_flag(const attention::AttentionParams& p, const Work& work, int tile,
                                                  int warp) const {
    const int tiles = ScoreTiles::num_tiles(p.sequences.max_seqlen_q);
    const int64_t pair = int64_t{work.key_head} * p.batch + work.batch;
    const int64_t row_of_tiles = pair * p.queries_per_key_head() + work.head_of_group;
    return dq_nan_flags[(row_of_tiles * tiles + tiles - 1 - tile) * 4 + warp];
  }
};

// Which gradients the products of a launch make: dK, dV or both, a block each.
struct WantedGradients {
  bool dk;
  bool dv;
  FLASH_HOST_DEVICE int count() const { return dk + dv; }
};

struct StoringArguments {
  OperandMap q;  // in boxes of ScoreTiles::kRows rows, as all are
  OperandMap k;
  OperandMap v;
  OperandMap dout;
  OperandMap bias;  // of BiasMask kernels
  attention::BackwardParams params;
  StoringWorkspace workspace;
  ScoreTiles tiles;
  Schedule schedule;  // of the launch
  uint32_t* claims;   // its counter, 0 before
  WantedGradients wanted;
  float scale_log2e;  // scale * log2(e)
  bool scales_lse;    // statistics hold LSE * log2(e): only a positive scale changes scores, or a mask hides them
};

}  // namespace flash_attn_ext::sm90
