// delta = rowsum(dO ∘ O) − dlse where it is pending: the dQ or the fused kernel computes it, either for the rows that
// a warp owns, or together with the LSE for all queries of a head.
#pragma once

#include "kernels/common/rows/row_products.cuh"
#include "kernels/score/score_gradient.cuh"
#include "kernels/sm80/sm80_kernels.h"
#include "tile/accumulator.h"

namespace flash_attn_ext::sm80 {

// Computes delta of the thread's rows of an accumulator whose first row is first_query. The four threads that share a
// row read 16 bytes each at a time, which the rows of O and dO are multiples of (plan::DeltaSource). CTAs that share
// rows, for slices of dQ's columns, write the same bits, so a repair kernel can read them whichever CTA was last.
template <class Element, class Acc>
__device__ __forceinline__ void compute_delta(float (&delta)[Acc::kThreadRows], const BackwardParams& p,
                                              const HeadCoord& coord, int64_t first_query) {
  using Chunk = common::Chunk<Element>;
  const int64_t query = first_query + Acc::row(0);
  const int rows = static_cast<int>(min(coord.sequence.num_queries - query, int64_t{16 * Acc::kRowTiles}));
  const int64_t row = coord.sequence.query_begin + query;
  const int first_column = tile::lane() % 4 * Chunk::kCount;
  common::PairedRows<Element> chunks = {p.out.row<const Element>(coord.sequence.batch, coord.head, row) + first_column,
                                        p.dout.row<const Element>(coord.sequence.batch, coord.head, row) + first_column,
                                        p.out.row_stride, p.dout.row_stride};
  for (float& sum : delta) sum = 0.0f;
#pragma unroll 1
  for (int column = first_column; column < static_cast<int>(p.head_dim_v); column += 4 * Chunk::kCount) {
    common::add_products<Chunk>(delta, chunks, rows, [](int r) { return Acc::row_step(r); });
    chunks.out += 4 * Chunk::kCount;
    chunks.dout += 4 * Chunk::kCount;
  }
#pragma unroll
  for (int r = 0; r < Acc::kThreadRows; ++r) {
    delta[r] = tile::quad_sum(delta[r]);
    if (Acc::row_step(r) >= rows) continue;
    if (p.dlse.present()) {
      delta[r] -= p.dlse.at<const float>(coord.sequence.batch, coord.head, row)[Acc::row_step(r)];
    }
    if (tile::lane() % 4 == 0) {
      p.delta.at<float>(coord.sequence.batch, coord.head, row)[Acc::row_step(r)] = delta[r];
    }
  }
}

// The QueryStatistics of a score that is only scaled, in two thirds of the shared memory.
struct alignas(8) HeadStatistics {
  float lse;
  float delta;

  __device__ __forceinline__ operator QueryStatistics() const { return {.lse = lse, .delta = delta, .residual = 0.0f}; }
};

// Sums over groups of eight lanes, one for each of kRows rows: lane i gets the sum of row i % kRows. Each step sends
// half of the values, so that eight sums take seven shuffles.
template <int kRows>
__device__ __forceinline__ float sum_rows(float (&values)[kRows]) {
  static_assert(kRows == 4 || kRows == 8);
#pragma unroll
  for (int step = 1; step < kRows; step *= 2) {
    const bool upper = (tile::lane() & step) != 0;
#pragma unroll
    for (int i = 0; i < kRows / (2 * step); ++i) {
      const float sent = upper ? values[2 * i] : values[2 * i + 1];
      values[i] = (upper ? values[2 * i + 1] : values[2 * i]) + __shfl_xor_sync(0xFFFFFFFFu, sent, step);
    }
  }
  return kRows == 8 ? values[0] : values[0] + __shfl_xor_sync(0xFFFFFFFFu, values[0], 4);
}

// rowsum(dO ∘ O) of kRows queries from `first` on, kRowStep apart. Eight threads share a row, and each gets the sum of
// one row, as in sum_rows. All loads are in flight together. Past the end the last query is read again, since a test of
// each row would take registers that the kernel needs.
template <class Element, int kRows, int kRowStep>
__device__ __forceinline__ float multiply_outputs(const BackwardParams& p, const HeadCoord& coord, int first) {
  using Chunk = common::Chunk<Element>;
  const int last_query = static_cast<int>(coord.sequence.num_queries) - 1;
  const int column = tile::lane() % 8 * Chunk::kCount;
  const bool exists = column < static_cast<int>(p.head_dim_v);
  const int64_t row = coord.sequence.query_begin + min(first, last_query);
  const int64_t batch = coord.sequence.batch;
  const auto* out = p.out.row<const Element>(batch, coord.head, row) + (exists ? column : 0);
  const auto* dout = p.dout.row<const Element>(batch, coord.head, row) + (exists ? column : 0);
  Chunk outs[kRows];
  Chunk douts[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    outs[i] = *reinterpret_cast<const Chunk*>(out);
    douts[i] = *reinterpret_cast<const Chunk*>(dout);
    const bool moves = first + (i + 1) * kRowStep <= last_query;
    out += moves ? kRowStep * p.out.row_stride : 0;
    dout += moves ? kRowStep * p.dout.row_stride : 0;
  }
  float sums[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) sums[i] = exists ? common::add_product(0.0f, outs[i], douts[i]) : 0.0f;
  return sum_rows(sums);
}

// Loads the statistics of queries [0, num_rows). Where delta is pending, computes it from O and dO and writes it for
// common/rows/attention_rows.cuh, too.
template <class Kernel>
__device__ __forceinline__ void load_head_statistics(HeadStatistics* statistics, const BackwardParams& p,
                                                     const HeadCoord& coord, int num_rows) {
  using Element = typename Kernel::Element;
  constexpr int kLanes = 8;  // lanes that share a row
  static_assert(Kernel::kHeadDim * sizeof(Element) == 16 * kLanes);
  constexpr int kRowStep = Kernel::kThreads / kLanes;
  constexpr int kRows = Kernel::kTile.keys / kRowStep;  // rows of a thread: together as many as a square head has
  const attention::StatisticView& known = p.delta_is_pending ? p.dlse : p.delta;
#pragma unroll 1
  for (int first = static_cast<int>(threadIdx.x) / kLanes; first < num_rows; first += kRows * kRowStep) {
    const int query = first + tile::lane() % kRows * kRowStep;
    const bool exists = query < coord.sequence.num_queries;
    const int64_t row = coord.sequence.query_begin + query;
    const float lse = exists ? *p.lse.at<const float>(coord.sequence.batch, coord.head, row) : -INFINITY;
    float delta = exists && known.present() ? *known.at<const float>(coord.sequence.batch, coord.head, row) : 0.0f;
    if (p.delta_is_pending) {
      delta = multiply_outputs<Element, kRows, kRowStep>(p, coord, first) - delta;
      if (exists) *p.delta.at<float>(coord.sequence.batch, coord.head, row) = delta;
    }
    if (query < num_rows) {
      statistics[query] = {.lse = lse == -INFINITY ? INFINITY : lse * kLog2e, .delta = exists ? delta : 0.0f};
    }
  }
}

}  // namespace flash_attn_ext::sm80
