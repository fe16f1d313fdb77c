// What a backward pass on Hopper needs to know about queries, in tiles: LSE and delta.
#pragma once

#include "attention/params.h"
#include "kernels/common/rows/row_products.cuh"
#include "kernels/score/score_tile.cuh"

namespace flash_attn_ext::sm90 {

// A tile of queries: LSE * log2(e) of each, then delta of each.
inline constexpr int kStatisticQueries = 64;

// Of `rows` queries from the tile's first one on, by a block of kThreads.
template <class Element, int kThreads>
struct QueryStatistics {
  const attention::BackwardParams& p;
  const attention::Sequence& sequence;
  int head;
  int tile;
  int rows;

  __device__ __forceinline__ void write(float* statistics) const {
    if (p.head_dim_v <= 64) {
      write<8>(statistics);
    } else {
      write<16>(statistics);
    }
  }

 private:
  template <int kLanes>
  __device__ __forceinline__ void write(float* statistics) const {
    constexpr int kRowStep = kThreads / kLanes;
    constexpr int kRows = kStatisticQueries / kRowStep;
    const int64_t first_row = sequence.query_begin + tile * kStatisticQueries;
    const int own = static_cast<int>(threadIdx.x) / kLanes;
    float delta[kRows] = {};
    common::sum_output_products<Element, kLanes>(delta, {p.out, p.dout, sequence.batch, head, p.head_dim_v},
                                                 first_row + own, rows - own, kRowStep);
    if (threadIdx.x % kLanes != 0) return;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = own + i * kRowStep;
      const bool exists = row < rows;
      float lse = -INFINITY;
      if (exists) {
        const int64_t query = first_row + row;
        lse = *p.lse.at<const float>(sequence.batch, head, query);
        if (p.dlse.present()) delta[i] -= *p.dlse.at<const float>(sequence.batch, head, query);
        *p.delta.at<float>(sequence.batch, head, query) = delta[i];
      }
      // Of a query that sees no key, probabilities vanish without a branch.
      statistics[row] = lse == -INFINITY ? INFINITY : lse * kLog2e;
      statistics[kStatisticQueries + row] = exists ? delta[i] : 0.0f;
    }
  }
};

}  // namespace flash_attn_ext::sm90
