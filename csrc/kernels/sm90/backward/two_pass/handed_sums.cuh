// Partial sums that one launch hands on to the next one: of dK and dV from query chunk to query chunk, of dQ from key
// band to key band. They are in float32, in the order in which accumulators hold them. Neighbouring threads have
// neighbouring 16 bytes, so that accesses coalesce.
#pragma once

#include "ptx/global_memory.h"
#include "tile/sm90/gemm.h"

namespace flash_attn_ext::sm90 {

template <class Sums>
struct HandedSums {
  static constexpr int kStep = tile::kWarpgroupSize * 4;  // floats from a thread's 16 bytes to its next ones
  static constexpr int kFloats = Sums::kColumnTiles * kStep;

  __device__ __forceinline__ static void store(float* of_warpgroup, const Sums& sums) {
    float* const to = of_warpgroup + first();
#pragma unroll
    for (int j = 0; j < Sums::kColumnTiles; ++j) {
      const float(&c)[4] = sums.c[0][j];
      __stcg(reinterpret_cast<float4*>(to + j * kStep), make_float4(c[0], c[1], c[2], c[3]));
    }
  }

  // Zeros where nothing was handed on.
  __device__ __forceinline__ static void load(Sums& sums, const float* of_warpgroup, bool handed) {
    const float* const from = of_warpgroup + first();
#pragma unroll
    for (int j = 0; j < Sums::kColumnTiles; ++j) {
      const float4 partial = ptx::load_or_zeros(reinterpret_cast<const float4*>(from + j * kStep), handed);
      float(&c)[4] = sums.c[0][j];
      c[0] = partial.x;
      c[1] = partial.y;
      c[2] = partial.z;
      c[3] = partial.w;
    }
  }

 private:
  __device__ __forceinline__ static int first() { return static_cast<int>(threadIdx.x) % tile::kWarpgroupSize * 4; }
};

}  // namespace flash_attn_ext::sm90
