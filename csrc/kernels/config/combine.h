// What the kernel that combines the splits of a row is compiled for, and the memory in which splits lie.
#pragma once

#include <cstdint>

#include "attention/division.h"

namespace flash_attn_ext::common {

// The warps of a CTA where each row has one. Where four warps can fetch all splits of a row at once, there are only
// four, because fewer warps start and merge faster.
inline constexpr int kCombineWarps = 8;
inline constexpr int kFewCombineWarps = 4;
inline constexpr int kRowsOfCombineCta = 4;  // where each row has a warp

// Splits that a warp fetches at once.
constexpr int splits_at_once(int columns) { return columns <= 128 ? 8 : 4; }
constexpr int splits_of_few_warps(int columns) { return kFewCombineWarps * splits_at_once(columns); }

// The columns of memory for the partial O of a split. The combine kernel is compiled for these.
constexpr int split_columns(int columns) { return columns <= 64 ? 64 : columns <= 128 ? 128 : 256; }

// The rows of a partial dQ have whole groups of as many columns as a warp sums.
constexpr int64_t dq_partial_columns(int64_t head_dim) { return attention::ceil_div(head_dim, 64) * 64; }

}  // namespace flash_attn_ext::common
