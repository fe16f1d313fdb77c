// LSE and delta of all queries of a head, for a block that works on all of them.
#pragma once

#include "kernels/score/score_gradient.cuh"
#include "kernels/sm80/backward/params.h"
#include "tile/accumulator.h"

namespace flash_attn_ext::sm80 {

// QueryStatistics of a score that only the scale changes, in two thirds of the shared memory.
struct alignas(8) HeadStatistics {
  float lse;
  float delta;

  __device__ __forceinline__ operator QueryStatistics() const { return {.lse = lse, .delta = delta, .residual = 0.0f}; }
};

// Of 8 elements each.
template <class Element>
__device__ __forceinline__ float dot_product(const uint4& left, const uint4& right) {
  const uint32_t lefts[4] = {left.x, left.y, left.z, left.w};
  const uint32_t rights[4] = {right.x, right.y, right.z, right.w};
  float sum = 0.0f;
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const int shift = e % 2 * 16;
    sum += ptx::to_float(static_cast<uint16_t>(lefts[e / 2] >> shift), Element{}) *
           ptx::to_float(static_cast<uint16_t>(rights[e / 2] >> shift), Element{});
  }
  return sum;
}

// Sums over groups of eight lanes, of one value for each of kRows rows: lane i gets that of row i % kRows. Half of the
// values leave at each step, so that eight sums take seven shuffles.
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

// rowsum(dO ∘ O) of kRows queries from `first` on, kRowStep apart, where eight threads share a row: each gets that of
// one row, as sum_rows deals them out. All loads are in flight together. Past the end the last query is read again.
template <class Element, int kRows, int kRowStep>
__device__ __forceinline__ float multiply_outputs(const BackwardParams& p, const WorkItem& item, int first) {
  constexpr int kChunk = 16 / sizeof(Element);
  const int last_query = static_cast<int>(item.sequence.num_queries) - 1;
  const int column = tile::lane() % 8 * kChunk;
  const bool exists = column < static_cast<int>(p.head_dim_v);
  const int64_t row = item.sequence.query_begin + min(first, last_query);
  const int64_t batch = item.sequence.batch;
  const auto* out = p.out.row<const Element>(batch, item.head, row) + (exists ? column : 0);
  const auto* dout = p.dout.row<const Element>(batch, item.head, row) + (exists ? column : 0);
  uint4 outs[kRows];
  uint4 douts[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    outs[i] = *reinterpret_cast<const uint4*>(out);
    douts[i] = *reinterpret_cast<const uint4*>(dout);
    const bool moves = first + (i + 1) * kRowStep <= last_query;
    out += moves ? kRowStep * p.out.row_stride : 0;
    dout += moves ? kRowStep * p.dout.row_stride : 0;
  }
  float sums[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) sums[i] = exists ? dot_product<Element>(outs[i], douts[i]) : 0.0f;
  return sum_rows(sums);
}

// Of queries [0, num_rows); delta from O and dO where it is left, and then written for common/attention_rows.cuh too.
template <class Kernel>
__device__ __forceinline__ void load_head_statistics(HeadStatistics* statistics, const BackwardParams& p,
                                                     const WorkItem& item, int num_rows) {
  using Element = typename Kernel::Element;
  constexpr int kLanes = 8;  // that share a row
  static_assert(Kernel::kHeadDim * sizeof(Element) == 16 * kLanes);
  constexpr int kRowStep = Kernel::kThreads / kLanes;
  constexpr int kRows = Kernel::kTile.keys / kRowStep;  // a thread: as many in all as a square head has
  const attention::StatisticView& known = p.delta_is_pending ? p.dlse : p.delta;
#pragma unroll 1
  for (int first = static_cast<int>(threadIdx.x) / kLanes; first < num_rows; first += kRows * kRowStep) {
    const int query = first + tile::lane() % kRows * kRowStep;
    const bool exists = query < item.sequence.num_queries;
    const int64_t row = item.sequence.query_begin + query;
    const float lse = exists ? *p.lse.at<const float>(item.sequence.batch, item.head, row) : -INFINITY;
    float delta = exists && known.present() ? *known.at<const float>(item.sequence.batch, item.head, row) : 0.0f;
    if (p.delta_is_pending) {
      delta = multiply_outputs<Element, kRows, kRowStep>(p, item, first) - delta;
      if (exists) *p.delta.at<float>(item.sequence.batch, item.head, row) = delta;
    }
    if (query < num_rows) {
      statistics[query] = {.lse = lse == -INFINITY ? INFINITY : lse * kLog2e, .delta = exists ? delta : 0.0f};
    }
  }
}

}  // namespace flash_attn_ext::sm80
