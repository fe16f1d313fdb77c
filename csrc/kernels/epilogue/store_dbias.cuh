// Writes a bias's gradient in the type that its memory has (attention::BiasGradient): float32, or the 16-bit Element.
#pragma once

#include "attention/params.h"
#include "tile/element.h"

namespace flash_attn_ext {

template <class Element>
__device__ __forceinline__ void store_dbias(const attention::BiasGradient& g, int64_t offset, float value) {
  if (g.element == attention::ElementType::kFloat32) {
    float* target = static_cast<float*>(g.data) + offset;
    *target = g.starts_at_zero ? *target + value : value;
  } else if constexpr (sizeof(Element) == 2) {
    static_cast<Element*>(g.data)[offset] = Element(value);
  }
}

// 8 neighbouring elements, from a multiple of 16 bytes on, marked to leave L2 first. (nvcc cuts a plain store of what
// asm computes into four.)
template <class Element>
__device__ __forceinline__ void store_dbias_chunk(const attention::BiasGradient& g, int64_t offset, float4 low,
                                                  float4 high) {
  if (g.element == attention::ElementType::kFloat32) {
    auto* target = reinterpret_cast<float4*>(static_cast<float*>(g.data) + offset);
    if (g.starts_at_zero) {
      const float4 old_low = target[0];
      const float4 old_high = target[1];
      low = {old_low.x + low.x, old_low.y + low.y, old_low.z + low.z, old_low.w + low.w};
      high = {old_high.x + high.x, old_high.y + high.y, old_high.z + high.z, old_high.w + high.w};
    }
    __stcs(target, low);
    __stcs(target + 1, high);
  } else {
    const uint4 packed = {ptx::pack(low.x, low.y, Element{}), ptx::pack(low.z, low.w, Element{}),
                          ptx::pack(high.x, high.y, Element{}), ptx::pack(high.z, high.w, Element{})};
    __stcs(reinterpret_cast<uint4*>(static_cast<Element*>(g.data) + offset), packed);
  }
}

}  // namespace flash_attn_ext
