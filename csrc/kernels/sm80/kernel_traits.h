// What a kernel is compiled for: an element type, and a row of its table.
#pragma once

#include "kernels/config/sm80.h"

namespace flash_attn_ext::sm80 {

template <class ElementType, auto kConfigValue>
struct KernelTraits {
  using Element = ElementType;
  static constexpr auto kConfig = kConfigValue;
  static constexpr int kHeadDim = kConfig.head_dim;
  static constexpr bool kGeneric = kConfig.score == ScoreMode::kGeneric;
  static constexpr bool kHasBiasMask = kGeneric || kConfig.score == ScoreMode::kBiasMask;
};

}  // namespace flash_attn_ext::sm80
