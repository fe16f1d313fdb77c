// A warpgroup's accumulator in float32 memory, in register order: of each column tile a thread has 16 bytes, and
// neighbouring threads have neighbouring 16 bytes, so that accesses coalesce.
#pragma once

#include "tile/sm90/gemm.h"

namespace flash_attn_ext::tile {

template <class Acc>
struct RegisterOrder {
  static constexpr int kTileFloats = 4 * kWarpgroupSize;  // of a column tile
  static constexpr int kFloats = Acc::kColumnTiles * kTileFloats;

  // Where the thread's floats begin.
  __device__ __forceinline__ static int own() { return static_cast<int>(threadIdx.x) % kWarpgroupSize * 4; }

  // to: the thread's first floats. store: writes 16 bytes.
  template <class Store>
  __device__ __forceinline__ static void store(float* to, const Acc& acc, Store&& store) {
#pragma unroll
    for (int j = 0; j < Acc::kColumnTiles; ++j) {
      const float(&c)[4] = acc.c[0][j];
      store(reinterpret_cast<float4*>(to + j * kTileFloats), float4{c[0], c[1], c[2], c[3]});
    }
  }
  __device__ __forceinline__ static void store(float* to, const Acc& acc) {
    store(to, acc, [](float4* chunk16, const float4& floats) { *chunk16 = floats; });
  }

  // Loads the accumulator, or adds to it. from: the thread's first floats. load: reads 16 bytes.
  template <bool kAdds, class Load>
  __device__ __forceinline__ static void load(Acc& acc, const float* from, Load&& load) {
#pragma unroll
    for (int j = 0; j < Acc::kColumnTiles; ++j) {
      const float4 floats = load(reinterpret_cast<const float4*>(from + j * kTileFloats));
      float(&c)[4] = acc.c[0][j];
      c[0] = kAdds ? c[0] + floats.x : floats.x;
      c[1] = kAdds ? c[1] + floats.y : floats.y;
      c[2] = kAdds ? c[2] + floats.z : floats.z;
      c[3] = kAdds ? c[3] + floats.w : floats.w;
    }
  }
};

}  // namespace flash_attn_ext::tile
