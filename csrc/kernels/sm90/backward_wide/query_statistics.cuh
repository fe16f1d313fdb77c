// What the dQ kernel needs to know about queries, in tiles: LSE and delta.
#pragma once

#include "attention/params.h"
#include "kernels/common/rows/row_products.cuh"
#include "kernels/plan/score_tiles.h"
#include "kernels/score/score_tile.cuh"

namespace flash_attn_ext::sm90 {

// Of a tile's `rows` queries that exist, by a block of kThreads: LSE * log2(e) of each, then delta of each. kLanes
// neighbouring lanes share a row, and add up in a fixed butterfly order.
template <class Element, int kThreads>
struct QueryStatistics {
  static constexpr int kQueries = ScoreTiles::kRows;
  static constexpr int kLanes = 16;
  static constexpr int kRowStep = kThreads / kLanes;
  static constexpr int kRows = kQueries / kRowStep;  // of a thread

  const attention::BackwardParams& p;
  const attention::Sequence& sequence;
  int head;
  int tile;
  int rows;

  __device__ __forceinline__ void write(float* statistics) const {
    const int64_t first_row = sequence.query_begin + tile * kQueries;
    const int own = static_cast<int>(threadIdx.x) / kLanes;
    float delta[kRows] = {};
    if (is_readable(p.out) && is_readable(p.dout)) {
      sum<common::Piece<Element>>(delta, first_row + own, rows - own);
    } else {
      sum<common::Piece<Element, 1>>(delta, first_row + own, rows - own);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int offset = kLanes / 2; offset > 0; offset /= 2) delta[i] += __shfl_xor_sync(0xFFFFFFFFu, delta[i], offset);
    }
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
      statistics[kQueries + row] = exists ? delta[i] : 0.0f;
    }
  }

 private:
  // 16 bytes at a time.
  __device__ __forceinline__ bool is_readable(const attention::MatrixView& view) const {
    return view.column_stride == 1 && (p.head_dim_v | view.row_stride) % common::Piece<Element>::kCount == 0 &&
           reinterpret_cast<uintptr_t>(view.row<const Element>(sequence.batch, head, 0)) % 16 == 0;
  }

  template <class Piece>
  __device__ __forceinline__ void sum(float (&sums)[kRows], int64_t first_row, int num_rows) const {
    const auto* out = p.out.row<const Element>(sequence.batch, head, first_row);
    const auto* dout = p.dout.row<const Element>(sequence.batch, head, first_row);
    for (int64_t column = threadIdx.x % kLanes * Piece::kCount; column < p.head_dim_v;
         column += kLanes * Piece::kCount) {
      common::add_products<Piece>(sums,
                                  {out + column * p.out.column_stride, dout + column * p.dout.column_stride,
                                   p.out.row_stride, p.dout.row_stride},
                                  num_rows, [](int i) { return i * kRowStep; });
    }
  }
};

}  // namespace flash_attn_ext::sm90
