// LSE and delta of all queries of a head, for a block that works on all of them.
#pragma once

#include "attention/params.h"
#include "kernels/sm80/score_gradient.cuh"
#include "tile/fragment.h"

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

// Of queries [0, num_rows); delta from O and dO where it is left, and then written for common/attention_rows.cuh too.
// Eight threads share a row of 64 elements, and a thread's loads for kTile.keys rows are in flight together.
template <class Kernel>
__device__ __forceinline__ void load_head_statistics(HeadStatistics* statistics, const attention::BackwardParams& p,
                                                     const WorkItem& item, int num_rows) {
  using Element = typename Kernel::Element;
  constexpr int kChunk = 16 / sizeof(Element);
  constexpr int kLanes = Kernel::kHeadDim / kChunk;  // that share a row
  constexpr int kRowStep = Kernel::kThreads / kLanes;
  constexpr int kRows = Kernel::kTile.keys / kRowStep;
  static_assert(kLanes == 8);
  const int64_t batch = item.sequence.batch;
  const int num_queries = static_cast<int>(item.sequence.num_queries);
  const int column = tile::lane() % kLanes * kChunk;
  const bool adds = p.delta_is_left && column < static_cast<int>(p.head_dim_v);
  const attention::StatisticView& known = p.delta_is_left ? p.dlse : p.delta;
#pragma unroll 1
  for (int first = static_cast<int>(threadIdx.x) / kLanes; first < num_rows; first += kRows * kRowStep) {
    const int64_t row = item.sequence.query_begin + first;
    const auto* out = p.out.row<const Element>(batch, item.head, row) + column;
    const auto* dout = p.dout.row<const Element>(batch, item.head, row) + column;
    uint4 outs[kRows] = {};
    uint4 douts[kRows] = {};
    float lse[kRows];
    float known_part[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int step = i * kRowStep;
      const bool exists = first + step < num_queries;
      lse[i] = exists ? p.lse.at<const float>(batch, item.head, row)[step] : -INFINITY;
      known_part[i] = exists && known.present() ? known.at<const float>(batch, item.head, row)[step] : 0.0f;
      if (!exists || !adds) continue;
      outs[i] = *reinterpret_cast<const uint4*>(out + step * p.out.row_stride);
      douts[i] = *reinterpret_cast<const uint4*>(dout + step * p.dout.row_stride);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float sum = tile::quad_sum(dot_product<Element>(outs[i], douts[i]));
      sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 4);
      const float delta = p.delta_is_left ? sum - known_part[i] : known_part[i];
      const int query = first + i * kRowStep;
      if (tile::lane() % kLanes != 0 || query >= num_rows) continue;
      statistics[query] = {.lse = lse[i] == -INFINITY ? INFINITY : lse[i] * kLog2e, .delta = delta};
      if (p.delta_is_left && query < num_queries) p.delta.at<float>(batch, item.head, row)[i * kRowStep] = delta;
    }
  }
}

}  // namespace flash_attn_ext::sm80
