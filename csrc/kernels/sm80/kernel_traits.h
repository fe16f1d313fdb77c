// What a kernel is compiled for.
#pragma once

#include "kernels/config/sm80.h"

namespace flash_attn_ext::sm80 {

template <class ElementType, int kHeadDimValue, Variant kVariantValue>
struct KernelTraits {
  using Element = ElementType;
  static constexpr int kHeadDim = kHeadDimValue;
  static constexpr Variant kVariant = kVariantValue;
  static constexpr bool kExtended = kVariant == Variant::kExtended;
  static constexpr bool kHasBiasMask = kExtended || kVariant == Variant::kBiasMask;
};

}  // namespace flash_attn_ext::sm80
