// What all portable attention kernels, for any GPU with tensor cores, share. config/sm80_forward.h,
// config/sm80_backward.h and config/split.h have their tables.
#pragma once

#include <cstdint>

#include "kernels/config/tables.h"

namespace flash_attn_ext::sm80 {

inline constexpr int kWarpSize = 32;

// The shared memory that a CTA may have on every GPU of compute capability 8.0 and later. 8.6, 8.9 and 12.0 have no
// more.
inline constexpr int kSharedBytes = 99 * 1024;

// Head dims that kernels are compiled for. Smaller ones are zero-padded. Wider elements skip some head dims, to keep
// the build short.
constexpr int head_dim_bucket(int element_bytes, int64_t head_dim) {
  const bool wide = element_bytes == 4;
  if (head_dim <= 64) return 64;
  if (head_dim <= 96 && !wide) return 96;
  if (head_dim <= 128) return 128;
  if (head_dim <= 192 && !wide) return 192;
  if (head_dim <= 256) return 256;
  return head_dim <= 512 ? 512 : 576;
}

// Callers may allow single TF32 GEMMs, but never require them. So only scale-only kernels of the head dims that are
// used most have them.
inline constexpr int kLargestTf32HeadDim = 128;

// The row of a table for a call: the first one of the score mode that holds the head dim, else the generic one. Rows of
// one element size and score mode stand in the order of their head dims. A backend refuses larger head dims than those
// of generic rows; for them this is the largest generic row.
template <class Config, int kRows>
constexpr int find_row(const Config (&table)[kRows], int element_bytes, int64_t head_dim, ScoreMode score) {
  int largest = -1;
  for (int row = 0; row < kRows; ++row) {
    const Config& config = table[row];
    if (config.element_bytes != element_bytes || config.score != score) continue;
    if (head_dim <= config.head_dim) return row;
    largest = row;
  }
  return score == ScoreMode::kGeneric ? largest : find_row(table, element_bytes, head_dim, ScoreMode::kGeneric);
}

// Which kernels of forward mode there are.
constexpr bool has_tangent_kernel(int element_bytes, int head_dim) {
  return element_bytes == 4 ? head_dim == 64 || head_dim == 128 : head_dim <= 256;
}

// S and S' are both live, as S and dP in the dQ kernel, and each tile comes with its tangent. With two stages K and V
// have one each. Where two do not fit, K and V share one.
constexpr TileShape tangent_tile(int element_bytes, int head_dim) {
  if (element_bytes == 4) {
    if (head_dim <= 64) return {.queries = 64, .keys = 32, .warps = 4, .columns = head_dim, .stages = 2};
    return {.queries = 64, .keys = 32, .warps = 4, .columns = head_dim};
  }
  if (head_dim <= 64) return {.queries = 128, .keys = 64, .warps = 4, .columns = head_dim, .stages = 2};
  if (head_dim <= 128) return {.queries = 128, .keys = 32, .warps = 4, .columns = head_dim, .stages = 2};
  return {.queries = 64, .keys = 32, .warps = 4, .columns = head_dim, .stages = head_dim <= 192 ? 2 : 1};
}

}  // namespace flash_attn_ext::sm80
