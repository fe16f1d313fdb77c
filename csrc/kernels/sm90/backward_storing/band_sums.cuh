// Sums of dK or dV that one band's launch hands to the next one's: float32, in the order of accumulators.
#pragma once

#include "kernels/sm90/backward_storing/traits.h"

namespace flash_attn_ext::sm90 {

// Each thread's 16 bytes lie beside its neighbours'.
template <class Sums>
struct BandSums {
  static constexpr int kStep = tile::kWarpgroupSize * 4;  // floats, to the thread's next ones
  static constexpr int kFloats = Sums::kColumnTiles * kStep;

  __device__ __forceinline__ static void leave(float* of_warpgroup, const Sums& sums) {
    float* const to = of_warpgroup + first();
#pragma unroll
    for (int j = 0; j < Sums::kColumnTiles; ++j) {
      const float(&c)[4] = sums.c[0][j];
      __stcg(reinterpret_cast<float4*>(to + j * kStep), make_float4(c[0], c[1], c[2], c[3]));
    }
  }

  __device__ __forceinline__ static void take(Sums& sums, const float* of_warpgroup) {
    const float* const from = of_warpgroup + first();
#pragma unroll
    for (int j = 0; j < Sums::kColumnTiles; ++j) {
      const float4 part = __ldcg(reinterpret_cast<const float4*>(from + j * kStep));
      float(&c)[4] = sums.c[0][j];
      c[0] = part.x;
      c[1] = part.y;
      c[2] = part.z;
      c[3] = part.w;
    }
  }

 private:
  __device__ __forceinline__ static int first() { return static_cast<int>(threadIdx.x) % tile::kWarpgroupSize * 4; }
};

}  // namespace flash_attn_ext::sm90
