// Sets a flag for each warp whose rows have a NaN, for the repair kernel (kernels/common/repair/repair.h).
#pragma once

#include <cstdint>

#include "tile/accumulator.h"

namespace flash_attn_ext {

// flags: one per warp of the launch.
template <int kWarps, class... Accs>
__device__ __forceinline__ void flag_nan(uint8_t* flags, const Accs&... results) {
  const bool found = __any_sync(0xFFFFFFFFu, (results.has_nan() || ...));
  if (tile::lane() == 0) flags[blockIdx.x * kWarps + tile::warp()] = found;
}

}  // namespace flash_attn_ext
