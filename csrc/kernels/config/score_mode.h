// What a kernel can do to a score. It is one column of the tables of kernels.
#pragma once

namespace flash_attn_ext {

enum class ScoreMode {
  kScaleOnly,               // a positive scale, and nothing else that changes a score
  kDropout,                 // scale and dropout
  kMask,                    // scale and a boolean mask
  kBiasMask,                // scale and a bias, a mask or both
  kGenericWithoutBiasMask,  // everything but a bias and a mask
  kGeneric,                 // everything
};

}  // namespace flash_attn_ext
