// delta = rowsum(dO ∘ O) − dLSE of the rows that a warp owns, where no kernel of its own computed it before.
#pragma once

#include "kernels/score/score_tile.cuh"
#include "kernels/sm80/backward/params.h"
#include "tile/accumulator.h"

namespace flash_attn_ext::sm80 {

// For the thread's rows of an accumulator whose first row is first_query. The four threads that share a row read 16
// bytes each at a time: rows of O and dO have whole ones (computes_delta). Blocks that share rows, for slices of dQ's
// columns, write the same bits: each may have to read what is written again (dq_without_tensor_cores).
template <class Element, class Acc>
__device__ __forceinline__ void compute_delta(float (&delta)[Acc::kThreadRows], const BackwardParams& p,
                                              const WorkItem& item, int64_t first_query) {
  constexpr int kChunk = 16 / sizeof(Element);
  struct alignas(16) Chunk {
    Element elements[kChunk];
  };
  const int64_t query = first_query + Acc::row(0);
  const int rows = static_cast<int>(min(item.sequence.num_queries - query, int64_t{16 * Acc::kRowTiles}));
  const int64_t row = item.sequence.query_begin + query;
  const int first_column = tile::lane() % 4 * kChunk;
  const Element* out = p.out.row<const Element>(item.sequence.batch, item.head, row) + first_column;
  const Element* dout = p.dout.row<const Element>(item.sequence.batch, item.head, row) + first_column;
  for (float& sum : delta) sum = 0.0f;
#pragma unroll 1
  for (int column = first_column; column < static_cast<int>(p.head_dim_v); column += 4 * kChunk) {
    Chunk outs[Acc::kThreadRows];
    Chunk douts[Acc::kThreadRows];
#pragma unroll
    for (int r = 0; r < Acc::kThreadRows; ++r) {
      if (Acc::row_step(r) >= rows) continue;
      outs[r] = *reinterpret_cast<const Chunk*>(out + Acc::row_step(r) * p.out.row_stride);
      douts[r] = *reinterpret_cast<const Chunk*>(dout + Acc::row_step(r) * p.dout.row_stride);
    }
#pragma unroll
    for (int r = 0; r < Acc::kThreadRows; ++r) {
      if (Acc::row_step(r) >= rows) continue;
#pragma unroll
      for (int e = 0; e < kChunk; ++e) {
        delta[r] += static_cast<float>(outs[r].elements[e]) * static_cast<float>(douts[r].elements[e]);
      }
    }
    out += 4 * kChunk;
    dout += 4 * kChunk;
  }
#pragma unroll
  for (int r = 0; r < Acc::kThreadRows; ++r) {
    delta[r] = tile::quad_sum(delta[r]);
    if (Acc::row_step(r) >= rows) continue;
    if (p.dlse.present()) {
      delta[r] -= p.dlse.at<const float>(item.sequence.batch, item.head, row)[Acc::row_step(r)];
    }
    if (tile::lane() % 4 == 0) {
      p.delta.at<float>(item.sequence.batch, item.head, row)[Acc::row_step(r)] = delta[r];
    }
  }
}

}  // namespace flash_attn_ext::sm80
