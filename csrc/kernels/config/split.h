// The tiles of the split-KV forward kernel, with their reasons. The figures behind some constants are in
// docs/kernels/log/split.md, "Figures behind constants".
#pragma once

#include <cstdint>
#include <iterator>

#include "kernels/config/sm80.h"

namespace flash_attn_ext::sm80 {

// The tile of a CTA: `rows` packed rows stay, and tiles of `keys` stream past in a pipeline of `stages`. Each of the
// row_warps x key_warps warps owns rows / row_warps rows and keys / key_warps of a tile's keys. The CTA computes
// `columns` columns of O. At least `ctas_per_sm` CTAs share an SM.
struct SplitTile {
  int rows;
  int keys;
  int row_warps;
  int key_warps;
  int columns;
  int stages;
  int ctas_per_sm;

  constexpr int threads() const { return row_warps * key_warps * kWarpSize; }
  constexpr int rows_per_warp() const { return rows / row_warps; }
  constexpr int keys_per_warp() const { return keys / key_warps; }
};

struct SplitConfig {
  int element_bytes;
  int head_dim;
  ScoreMode score = ScoreMode::kScaleOnly;
  SplitTile tile;
  bool appends_keys = false;  // may append new keys to a cache itself: kernels that have registers for it

  bool operator==(const SplitConfig&) const = default;
};

// The table of kernels. Few rows are bound by memory. So warps divide keys rather than rows, and all of them take part
// in the GEMMs. Three CTAs per SM keep more bytes in flight, 32 KiB of K and V per stage. 128 rows are bound by GEMMs,
// and warps of 32 rows read shared memory half as often. Rows of 1 KiB leave room for one stage and few rows. Tiles of
// 32 rows pay where 64 are not as fast, and those of 128 where they fit registers. Rows of one element size, score mode
// and head dim stand in the order of their packed rows.
// clang-format off
inline constexpr SplitConfig kSplitConfigs[] = {
    {.element_bytes = 2, .head_dim = 64,
     .tile = {.rows = 16, .keys = 128, .row_warps = 1, .key_warps = 4, .columns = 64, .stages = 2, .ctas_per_sm = 3},
     .appends_keys = true},
    {.element_bytes = 2, .head_dim = 64,
     .tile = {.rows = 32, .keys = 128, .row_warps = 2, .key_warps = 2, .columns = 64, .stages = 2, .ctas_per_sm = 3},
     .appends_keys = true},
    {.element_bytes = 2, .head_dim = 64,
     .tile = {.rows = 64, .keys = 64, .row_warps = 4, .key_warps = 1, .columns = 64, .stages = 2, .ctas_per_sm = 2},
     .appends_keys = true},
    {.element_bytes = 2, .head_dim = 64,
     .tile = {.rows = 128, .keys = 64, .row_warps = 4, .key_warps = 1, .columns = 64, .stages = 2, .ctas_per_sm = 2},
     .appends_keys = true},
    {.element_bytes = 2, .head_dim = 128,
     .tile = {.rows = 16, .keys = 64, .row_warps = 1, .key_warps = 4, .columns = 128, .stages = 2, .ctas_per_sm = 3},
     .appends_keys = true},
    {.element_bytes = 2, .head_dim = 128,
     .tile = {.rows = 32, .keys = 64, .row_warps = 2, .key_warps = 2, .columns = 128, .stages = 2, .ctas_per_sm = 3},
     .appends_keys = true},
    {.element_bytes = 2, .head_dim = 128,
     .tile = {.rows = 64, .keys = 64, .row_warps = 4, .key_warps = 1, .columns = 128, .stages = 2, .ctas_per_sm = 2},
     .appends_keys = true},
    {.element_bytes = 2, .head_dim = 128,
     .tile = {.rows = 128, .keys = 64, .row_warps = 4, .key_warps = 1, .columns = 128, .stages = 2, .ctas_per_sm = 2},
     .appends_keys = true},
    {.element_bytes = 2, .head_dim = 256,
     .tile = {.rows = 16, .keys = 32, .row_warps = 1, .key_warps = 2, .columns = 256, .stages = 2, .ctas_per_sm = 3},
     .appends_keys = true},
    {.element_bytes = 2, .head_dim = 256,
     .tile = {.rows = 64, .keys = 32, .row_warps = 4, .key_warps = 1, .columns = 256, .stages = 2, .ctas_per_sm = 2},
     .appends_keys = true},
    {.element_bytes = 2, .head_dim = 512,
     .tile = {.rows = 16, .keys = 32, .row_warps = 1, .key_warps = 2, .columns = 256, .stages = 1, .ctas_per_sm = 3},
     .appends_keys = true},
    {.element_bytes = 2, .head_dim = 512,
     .tile = {.rows = 32, .keys = 32, .row_warps = 2, .key_warps = 1, .columns = 256, .stages = 1, .ctas_per_sm = 2},
     .appends_keys = true},
    {.element_bytes = 2, .head_dim = 576,
     .tile = {.rows = 32, .keys = 32, .row_warps = 2, .key_warps = 1, .columns = 256, .stages = 1, .ctas_per_sm = 2},
     .appends_keys = true},

    {.element_bytes = 2, .head_dim = 64, .score = ScoreMode::kGeneric,
     .tile = {.rows = 16, .keys = 128, .row_warps = 1, .key_warps = 4, .columns = 64, .stages = 2, .ctas_per_sm = 3}},
    {.element_bytes = 2, .head_dim = 64, .score = ScoreMode::kGeneric,
     .tile = {.rows = 64, .keys = 64, .row_warps = 4, .key_warps = 1, .columns = 64, .stages = 2, .ctas_per_sm = 2}},
    {.element_bytes = 2, .head_dim = 128, .score = ScoreMode::kGeneric,
     .tile = {.rows = 16, .keys = 64, .row_warps = 1, .key_warps = 4, .columns = 128, .stages = 2, .ctas_per_sm = 3}},
    {.element_bytes = 2, .head_dim = 128, .score = ScoreMode::kGeneric,
     .tile = {.rows = 64, .keys = 64, .row_warps = 4, .key_warps = 1, .columns = 128, .stages = 2, .ctas_per_sm = 2}},
    {.element_bytes = 2, .head_dim = 256, .score = ScoreMode::kGeneric,
     .tile = {.rows = 16, .keys = 32, .row_warps = 1, .key_warps = 2, .columns = 256, .stages = 2, .ctas_per_sm = 3}},
    {.element_bytes = 2, .head_dim = 256, .score = ScoreMode::kGeneric,
     .tile = {.rows = 64, .keys = 32, .row_warps = 4, .key_warps = 1, .columns = 256, .stages = 2, .ctas_per_sm = 2}},
    {.element_bytes = 2, .head_dim = 512, .score = ScoreMode::kGeneric,
     .tile = {.rows = 32, .keys = 32, .row_warps = 2, .key_warps = 1, .columns = 256, .stages = 1, .ctas_per_sm = 2}},
    {.element_bytes = 2, .head_dim = 576, .score = ScoreMode::kGeneric,
     .tile = {.rows = 32, .keys = 32, .row_warps = 2, .key_warps = 1, .columns = 256, .stages = 1, .ctas_per_sm = 2}},

    {.element_bytes = 4, .head_dim = 64,
     .tile = {.rows = 16, .keys = 64, .row_warps = 1, .key_warps = 4, .columns = 64, .stages = 2, .ctas_per_sm = 3}},
    {.element_bytes = 4, .head_dim = 64,
     .tile = {.rows = 32, .keys = 64, .row_warps = 2, .key_warps = 2, .columns = 64, .stages = 2, .ctas_per_sm = 3}},
    {.element_bytes = 4, .head_dim = 64,
     .tile = {.rows = 64, .keys = 64, .row_warps = 4, .key_warps = 1, .columns = 64, .stages = 2, .ctas_per_sm = 2}},
    {.element_bytes = 4, .head_dim = 128,
     .tile = {.rows = 16, .keys = 32, .row_warps = 1, .key_warps = 2, .columns = 128, .stages = 2, .ctas_per_sm = 3}},
    {.element_bytes = 4, .head_dim = 128,
     .tile = {.rows = 64, .keys = 32, .row_warps = 4, .key_warps = 1, .columns = 128, .stages = 2, .ctas_per_sm = 2}},
    {.element_bytes = 4, .head_dim = 256,
     .tile = {.rows = 16, .keys = 32, .row_warps = 1, .key_warps = 2, .columns = 128, .stages = 1, .ctas_per_sm = 3}},
    {.element_bytes = 4, .head_dim = 256,
     .tile = {.rows = 32, .keys = 32, .row_warps = 2, .key_warps = 1, .columns = 128, .stages = 1, .ctas_per_sm = 2}},

    {.element_bytes = 4, .head_dim = 64, .score = ScoreMode::kGeneric,
     .tile = {.rows = 16, .keys = 64, .row_warps = 1, .key_warps = 4, .columns = 64, .stages = 2, .ctas_per_sm = 3}},
    {.element_bytes = 4, .head_dim = 64, .score = ScoreMode::kGeneric,
     .tile = {.rows = 64, .keys = 64, .row_warps = 4, .key_warps = 1, .columns = 64, .stages = 2, .ctas_per_sm = 2}},
    {.element_bytes = 4, .head_dim = 128, .score = ScoreMode::kGeneric,
     .tile = {.rows = 16, .keys = 32, .row_warps = 1, .key_warps = 2, .columns = 128, .stages = 2, .ctas_per_sm = 3}},
    {.element_bytes = 4, .head_dim = 128, .score = ScoreMode::kGeneric,
     .tile = {.rows = 64, .keys = 32, .row_warps = 4, .key_warps = 1, .columns = 128, .stages = 2, .ctas_per_sm = 2}},
    {.element_bytes = 4, .head_dim = 256, .score = ScoreMode::kGeneric,
     .tile = {.rows = 32, .keys = 32, .row_warps = 2, .key_warps = 1, .columns = 128, .stages = 1, .ctas_per_sm = 2}},
};
// clang-format on

// The row of the table with the smallest tile that holds the packed rows, or with the largest that there is. Smaller
// head dims are zero-padded.
constexpr int split_row(int element_bytes, int64_t head_dim, ScoreMode score, int64_t packed_rows) {
  int row = find_row(kSplitConfigs, element_bytes, head_dim, score);
  const SplitConfig& first = kSplitConfigs[row];
  const auto is_larger_one = [&](const SplitConfig& config) {
    return config.element_bytes == first.element_bytes && config.score == first.score &&
           config.head_dim == first.head_dim;
  };
  constexpr int kLast = static_cast<int>(std::size(kSplitConfigs)) - 1;
  while (kSplitConfigs[row].tile.rows < packed_rows && row < kLast && is_larger_one(kSplitConfigs[row + 1])) ++row;
  return row;
}

}  // namespace flash_attn_ext::sm80
