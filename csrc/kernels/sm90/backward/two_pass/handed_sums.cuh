// Partial sums that one launch hands on to the next one, in float32: of dK and dV from query chunk to query chunk, of
// dQ from key band to key band.
#pragma once

#include "ptx/global_memory.h"
#include "tile/sm90/register_order.h"

namespace flash_attn_ext::sm90 {

template <class Sums>
struct HandedSums {
  using Order = tile::RegisterOrder<Sums>;
  static constexpr int kFloats = Order::kFloats;

  __device__ __forceinline__ static void store(float* of_warpgroup, const Sums& sums) {
    Order::store(of_warpgroup + Order::own(), sums, [](float4* to, const float4& floats) { __stcg(to, floats); });
  }

  // Zeros where nothing was handed on.
  __device__ __forceinline__ static void load(Sums& sums, const float* of_warpgroup, bool handed) {
    Order::template load<false>(sums, of_warpgroup + Order::own(),
                                [&](const float4* from) { return ptx::load_or_zeros(from, handed); });
  }
};

}  // namespace flash_attn_ext::sm90
