// Partial sums that one launch hands on to the next one, in float32: of dK and dV from query chunk to query chunk, of
// dQ from key chunk to key chunk.
#pragma once

#include "ptx/global_memory.h"
#include "tile/sm90/register_order.h"

namespace flash_attn_ext::sm90 {

template <class Sums>
struct PartialSums {
  using Order = tile::RegisterOrder<Sums>;
  static constexpr int kFloats = Order::kFloats;

  __device__ __forceinline__ static void store(float* of_warpgroup, const Sums& sums) {
    Order::store(of_warpgroup + Order::own(), sums, [](float4* to, const float4& floats) { __stcg(to, floats); });
  }

  // Loads partial sums, or zeros where there are none.
  __device__ __forceinline__ static void load(Sums& sums, const float* of_warpgroup, bool there) {
    Order::template load<false>(sums, of_warpgroup + Order::own(),
                                [&](const float4* from) { return ptx::load_or_zeros(from, there); });
  }
};

}  // namespace flash_attn_ext::sm90
