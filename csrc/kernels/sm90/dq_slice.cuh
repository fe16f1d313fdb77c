// A slice of dQ: 8 columns of 64 queries, in register order, of which several CTAs have stored partial sums in float32.
// The kernels that add these up share it. A CTA has four warpgroups, and a thread has two columns of two rows.
//
// Bound: latency, because the partial sums lie in L2. So a thread has kAhead loads in flight at a time.
#pragma once

#include "kernels/epilogue/store_rows.cuh"
#include "ptx/math.h"
#include "tile/sm90/gemm.h"

namespace flash_attn_ext::sm90 {

struct DqSlice {
  using Columns = tile::WarpgroupAccumulator<8>;
  static constexpr int kColumns = 8;
  static constexpr int kFloats = tile::kWarpgroupRows * kColumns;
  static constexpr int kWarpgroups = 4;
  static constexpr int kThreads = kWarpgroups * tile::kWarpgroupSize;
  static constexpr int kAhead = 4;

  float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};  // of one row, then of the other

  __device__ __forceinline__ static int warpgroup() { return static_cast<int>(threadIdx.x) / tile::kWarpgroupSize; }

  // Adds the partial sums first, first + step, ... below end. from(i): where the slice's floats of partial sum i begin.
  template <class From>
  __device__ __forceinline__ void add(int first, int end, int step, From&& from) {
#pragma unroll 1
    for (int i = first; i < end; i += step * kAhead) {
      float4 ahead[kAhead];
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        const int at = i + k * step;
        const auto* const floats = reinterpret_cast<const float4*>(from(at));
        ahead[k] = at < end ? floats[thread()] : float4{0.0f, 0.0f, 0.0f, 0.0f};
      }
#pragma unroll
      for (int k = 0; k < kAhead; ++k) add(ahead[k]);
    }
  }

  // Adds up the sums of the CTA's warpgroups. The first warpgroup gets the result.
  __device__ __forceinline__ void combine() {
    __shared__ float4 sums[kWarpgroups][tile::kWarpgroupSize];
    sums[warpgroup()][thread()] = sum;
    __syncthreads();
    if (warpgroup() != 0) return;
#pragma unroll
    for (int other = 1; other < kWarpgroups; ++other) add(sums[other][thread()]);
  }

  // target: the warp's 16 rows, from the slice's first column on. Returns whether something is not finite.
  template <class Element>
  __device__ __forceinline__ bool store(const OutputRows<Element>& target, float scale) const {
    const int column = Columns::column(0, 0);
    if (column >= target.columns) return false;
    bool needs_recompute = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (Columns::row(r) >= target.rows) continue;
      const float low = (r == 0 ? sum.x : sum.z) * scale;
      const float high = (r == 0 ? sum.y : sum.w) * scale;
      *reinterpret_cast<uint32_t*>(target.data + Columns::row(r) * target.row_stride + column) =
          ptx::pack(low, high, Element{});
      needs_recompute |= fmaf(low, 0.0f, high * 0.0f) != 0.0f;
    }
    return needs_recompute;
  }

 private:
  __device__ __forceinline__ static int thread() { return static_cast<int>(threadIdx.x) % tile::kWarpgroupSize; }

  __device__ __forceinline__ void add(const float4& partial) {
    sum.x += partial.x;
    sum.y += partial.y;
    sum.z += partial.z;
    sum.w += partial.w;
  }
};

}  // namespace flash_attn_ext::sm90
