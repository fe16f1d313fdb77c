// The tiles of the kernel that recomputes dS for a bias that all batch entries share.
#pragma once

#include "attention/division.h"
#include "kernels/config/sm90.h"

namespace flash_attn_ext::sm80 {

// A CTA has this many queries, and keys, of the bias. It has 16 warps, each with 16 queries and half of the keys.
inline constexpr int kDbiasTile = 128;
inline constexpr int kDbiasWarps = 16;
inline constexpr int64_t kLargestDbiasHeadDim = 64;
inline constexpr int64_t kDbiasPartialBytes = int64_t{kDbiasTile} * kDbiasTile * int64_t{sizeof(float)};

// The kernel runs where Hopper's kernels do, so a CTA may have as much shared memory as theirs.
inline constexpr int kDbiasSharedBytes = sm90::kSharedBytes;

// The tiles that cover so many queries, or keys.
constexpr int64_t dbias_tiles(int64_t length) { return attention::ceil_div(length, int64_t{kDbiasTile}); }

// The head dim that the kernel is compiled for.
constexpr int dbias_head_dim(int64_t head_dim) { return head_dim <= 32 ? 32 : 64; }

}  // namespace flash_attn_ext::sm80
