// What a fast build has GPU kernels for: bfloat16, and head dims up to this (FLASH_ATTN_EXT_FAST_BUILD).
#pragma once

#include <cstdint>

namespace flash_attn_ext {

inline constexpr int64_t kFastBuildHeadDim = 128;

}  // namespace flash_attn_ext
