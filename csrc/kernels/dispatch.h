// Run-time values -> compile-time tags.
#pragma once

#include <cuda_runtime_api.h>

#include <type_traits>

#include "attention/params.h"
#include "kernels/tile_config.h"

namespace flash_attn_ext {

template <int kValue>
using Int = std::integral_constant<int, kValue>;

// Calls function(Int<bucket>) with the smallest head-dim bucket of the element type that holds head_dim.
// Kernels fill the tail with zeros. 16-bit elements alone have the widest; wider elements skip some, to keep the build
// short. kLargest: the largest bucket that the caller has kernels for.
template <int kElementBytes, int kLargest = 512, class Function>
cudaError_t with_head_dim(int64_t head_dim, Function&& function) {
  if (head_dim <= 64) return function(Int<64>{});
  if constexpr (kElementBytes == 2) {
    if (head_dim <= 96) return function(Int<96>{});
  }
  if (head_dim <= 128) return function(Int<128>{});
  if constexpr (kElementBytes == 2) {
    if (head_dim <= 192) return function(Int<192>{});
  }
  if constexpr (kLargest >= 256) {
    if (head_dim <= 256) return function(Int<256>{});
  }
  if constexpr (kElementBytes == 2) {
    if (head_dim <= 512) return function(Int<512>{});
  }
  return cudaErrorInvalidValue;  // backends refuse larger ones
}

// Scores that are scale * q.k with a positive scale, which can be folded into the exponent.
inline bool only_scales_up(const attention::AttentionParams& params) {
  return params.score_mod.plain() && params.score_mod.scale > 0.0;
}

// The same, with a bias or a mask or both.
inline bool scales_up_and_adds(const attention::AttentionParams& params) {
  return params.score_mod.softcap == 0.0 && !params.score_mod.alibi.present() && params.score_mod.scale > 0.0;
}

}  // namespace flash_attn_ext
