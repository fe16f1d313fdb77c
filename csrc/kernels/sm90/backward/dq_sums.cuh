// dQ of few queries, where each phase of tiles of keys has left sums of its own (Walk::kDivide): scale times their sum,
// in a fixed order.
//
// Grid: tiles of queries of all heads, times slices of kSumColumns columns, as an accumulator has them. kSumGroups
// warpgroups share the phases. Bound: latency, since sums lie in L2; so each has kSumsAhead on their way at a time.
#pragma once

#include "kernels/sm90/backward/arguments.h"
#include "ptx/dependent_launch.h"
#include "ptx/math.h"
#include "tile/sm90/gemm.h"

namespace flash_attn_ext::sm90 {

inline constexpr int kSumGroups = 4;
inline constexpr int kSumThreads = kSumGroups * tile::kWarpgroupSize;
inline constexpr int kSumColumns = 8;
inline constexpr int kSumsAhead = 4;

__device__ __forceinline__ void add(float4& sum, const float4& part) {
  sum.x += part.x;
  sum.y += part.y;
  sum.z += part.z;
  sum.w += part.w;
}

template <class Element>
struct DqSums {
  const BackwardArguments& args;
  const attention::Sequence sequence;
  const QueryTile at;

  __device__ __forceinline__ void run() const {
    __shared__ float4 sums[kSumGroups][tile::kWarpgroupSize];
    const VisitOrder::Tiles visitors =
        args.order.visitor(args.params.visibility, sequence, 0, Walk::kDivide).visitors(at.tile);
    if (visitors.end - visitors.begin < 2) return;  // dQ is 0 already, or written by the one
    const int group = static_cast<int>(threadIdx.x) / tile::kWarpgroupSize;
    sums[group][thread()] = sum_of_group(visitors, group);
    __syncthreads();
    if (group != 0) return;
    float4 dq = sums[0][thread()];
#pragma unroll
    for (int other = 1; other < kSumGroups; ++other) add(dq, sums[other][thread()]);
    store(0, dq.x * args.gradient_scale, dq.y * args.gradient_scale);
    store(1, dq.z * args.gradient_scale, dq.w * args.gradient_scale);
  }

 private:
  __device__ __forceinline__ static int thread() { return static_cast<int>(threadIdx.x) % tile::kWarpgroupSize; }

  // Every kSumGroups-th of the phases that visit, from the group's on: of two rows, two columns each.
  __device__ __forceinline__ float4 sum_of_group(const VisitOrder::Tiles& visitors, int group) const {
    constexpr int kSliceFloats = VisitOrder::kQueries * kSumColumns;
    const int number = args.workspace.number_of(args.params, sequence, at);
    const int phases_of_all = 1 << args.order.log2_sums;
    const int phases = min(visitors.end - visitors.begin, phases_of_all);
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
    for (int i = group; i < phases; i += kSumGroups * kSumsAhead) {
      float4 ahead[kSumsAhead];
#pragma unroll
      for (int k = 0; k < kSumsAhead; ++k) {
        const int visitor = i + k * kSumGroups;
        const int64_t slice =
            int64_t{args.order.sums_of(number, visitors.begin + visitor & phases_of_all - 1)} * gridDim.y + blockIdx.y;
        const float* const from = args.workspace.dq_sums + slice * kSliceFloats + thread() * 4;
        ahead[k] = visitor < phases ? *reinterpret_cast<const float4*>(from) : float4{0.0f, 0.0f, 0.0f, 0.0f};
      }
#pragma unroll
      for (int k = 0; k < kSumsAhead; ++k) add(sum, ahead[k]);
    }
    return sum;
  }

  __device__ __forceinline__ void store(int r, float low, float high) const {
    using Slice = tile::WarpgroupAccumulator<kSumColumns>;
    const attention::BackwardParams& p = args.params;
    const int row = at.tile * VisitOrder::kQueries + tile::warp() * 16 + Slice::row(r);
    const int column = static_cast<int>(blockIdx.y) * kSumColumns + Slice::column(0, 0);
    if (row >= sequence.num_queries || column >= p.head_dim_qk) return;
    *reinterpret_cast<uint32_t*>(p.dq.row<Element>(sequence.batch, at.head, sequence.query_begin + row) + column) =
        ptx::pack(low, high, Element{});
    if (fmaf(low, 0.0f, high * 0.0f) != 0.0f) args.workspace.dq_nan_flag(p, at, tile::warp()) = 1;
  }
};

template <class Element>
__global__ void __launch_bounds__(kSumThreads)
    sum_dq_kernel(const __grid_constant__ BackwardArguments args, const __grid_constant__ QueryTileGrid grid) {
  ptx::wait_for_kernel_before();
  const QueryTile at = grid.at(blockIdx.x);
  const attention::Sequence sequence = args.params.sequences.at(at.batch);
  if (at.tile < VisitOrder::num_tiles(sequence.num_queries, VisitOrder::kQueries)) {
    DqSums<Element>{args, sequence, at}.run();
  }
}

}  // namespace flash_attn_ext::sm90
