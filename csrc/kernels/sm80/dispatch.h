// Turns the values of a plan into compile-time tags.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <type_traits>

#include "attention/score_mod.h"
#include "kernels/config/sm80.h"
#include "tile/element.h"

namespace flash_attn_ext::sm80 {

template <int kValue>
using Int = std::integral_constant<int, kValue>;

template <Variant kVariant>
using VariantTag = std::integral_constant<Variant, kVariant>;

template <class Function>
cudaError_t with_element(attention::ElementType element, bool tf32, Function&& function) {
  switch (element) {
    case attention::ElementType::kBFloat16:
      return function(__nv_bfloat16{});
    case attention::ElementType::kFloat16:
      return function(__half{});
    case attention::ElementType::kFloat32:
      return tf32 ? function(tile::Tf32{}) : function(float{});
    default:  // float64 has kernels of its own
      return cudaErrorInvalidValue;
  }
}

// Calls function(Int<head_dim>) for a head dim that the element type has kernels for (head_dim_bucket).
template <class Element, class Function>
cudaError_t with_head_dim(int head_dim, Function&& function) {
  constexpr bool kTf32 = std::is_same_v<Element, tile::Tf32>;
  if (head_dim == 64) return function(Int<64>{});
  if (head_dim == 128) return function(Int<128>{});
  if constexpr (!kTf32) {
    if (head_dim == 256) return function(Int<256>{});
  }
  if constexpr (sizeof(Element) == 2) {
    if (head_dim == 96) return function(Int<96>{});
    if (head_dim == 192) return function(Int<192>{});
    if (head_dim == 512) return function(Int<512>{});
  }
  return cudaErrorInvalidValue;
}

// The kernels of an element type and a head dim.
template <class Element, int kHeadDim>
struct KernelGroup {
  // TF32 has Plain kernels only.
  template <auto kHas>
  static constexpr bool has(Variant variant) {
    return kHas(sizeof(Element), kHeadDim, variant) &&
           (!std::is_same_v<Element, tile::Tf32> || variant == Variant::kPlain);
  }
};

// Calls function(VariantTag<variant>) if kHas(element bytes, head dim, variant) is true.
template <auto kHas, class Group, class Function>
cudaError_t with_variant(Variant variant, Function&& function) {
  cudaError_t error = cudaErrorInvalidValue;
  const auto call = [&](auto tag) {
    if constexpr (Group::template has<kHas>(tag())) {
      if (tag() == variant) error = function(tag);
    }
  };
  call(VariantTag<Variant::kPlain>{});
  call(VariantTag<Variant::kShort>{});
  call(VariantTag<Variant::kDropout>{});
  call(VariantTag<Variant::kBiasMask>{});
  call(VariantTag<Variant::kExtended>{});
  return error;
}

}  // namespace flash_attn_ext::sm80
