// Partial sums of dK or dV that the launch of one query chunk hands on to that of the next one, in float32 and in the
// order in which accumulators hold them.
#pragma once

#include "kernels/sm90/backward/two_pass/traits.h"

namespace flash_attn_ext::sm90 {

// Neighbouring threads have neighbouring 16 bytes, so that accesses coalesce.
template <class Sums>
struct ChunkSums {
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

  __device__ __forceinline__ static void load(Sums& sums, const float* of_warpgroup) {
    const float* const from = of_warpgroup + first();
#pragma unroll
    for (int j = 0; j < Sums::kColumnTiles; ++j) {
      const float4 partial = __ldcg(reinterpret_cast<const float4*>(from + j * kStep));
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
