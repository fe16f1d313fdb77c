// What all tables of kernels share: what a kernel can do to a score, and how many CTAs share a tile of rows.
#pragma once

#include <cstdint>

#include "attention/division.h"

namespace flash_attn_ext {

// One column of the tables.
enum class ScoreMode {
  kScaleOnly,               // a positive scale, and nothing else that changes a score
  kDropout,                 // scale and dropout
  kMask,                    // scale and a boolean mask
  kBiasMask,                // scale and a bias, a mask or both
  kGenericWithoutBiasMask,  // everything but a bias and a mask
  kGeneric,                 // everything
};

// CTAs that share a tile of rows. There is one even if there is no column, because it also writes the LSE.
constexpr int64_t num_slices(int64_t head_dim, int64_t columns) {
  return head_dim <= columns ? 1 : attention::ceil_div(head_dim, columns);
}

}  // namespace flash_attn_ext
