// What GEMMs and sums need to know about an element type.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "ptx/math.h"
#include "ptx/shared_memory.h"

namespace flash_attn_ext::tile {

// float32 in memory, with GEMMs that may round to TF32.
struct Tf32 {
  float value;

  Tf32() = default;
  __host__ __device__ explicit Tf32(float x) : value(x) {}
  __host__ __device__ explicit operator float() const { return value; }
};

template <class Element>
struct ElementTraits {
  using Accumulate = float;
};
template <>
struct ElementTraits<double> {
  using Accumulate = double;
};
// The type of sums, softmax and statistics.
template <class Element>
using Accumulate = typename ElementTraits<Element>::Accumulate;

// The inner length of one mma instruction.
template <class Element>
inline constexpr int kInner = 32 / sizeof(Element);

// Stores two neighbouring elements at once.
template <class Element>
__device__ __forceinline__ void store_pair(Element* target, float low, float high) {
  if constexpr (sizeof(Element) == 2) {
    *reinterpret_cast<uint32_t*>(target) = ptx::pack(low, high, Element{});
  } else {
    *reinterpret_cast<float2*>(target) = {low, high};
  }
}

template <class Element>
__device__ __forceinline__ void store_shared_pair(uint32_t address, float low, float high) {
  if constexpr (sizeof(Element) == 2) {
    ptx::store_shared(address, ptx::pack(low, high, Element{}));
  } else {
    ptx::store_shared(address, float2{low, high});
  }
}

}  // namespace flash_attn_ext::tile
