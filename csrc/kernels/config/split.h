// The tiles of the split-KV forward kernel, with their reasons. The figures behind some constants are in
// docs/kernels/log/split.md, "Figures behind constants".
#pragma once

#include <cstdint>
#include <initializer_list>

#include "kernels/config/sm80.h"

namespace flash_attn_ext::sm80 {

// What a kernel is compiled for. The number is that of the packed rows of a tile.
enum class SplitKind {
  kRows16,      // scale only: a positive scale, and nothing else that changes a score
  kRows32,      // the same
  kRows64,      // the same
  kRows128,     // the same
  kExtended16,  // generic: everything may change a score
  kExtended64,  // generic: everything may change a score
};

constexpr bool is_extended(SplitKind kind) { return kind == SplitKind::kExtended16 || kind == SplitKind::kExtended64; }

// The tile of a CTA: `rows` packed rows stay, and tiles of `keys` stream past in a pipeline of `stages`. Each of the
// row_warps x key_warps warps owns rows / row_warps rows and keys / key_warps of a tile's keys. The CTA computes
// `columns` columns of O. At least `blocks` CTAs share an SM.
struct SplitTile {
  int rows;
  int keys;
  int row_warps;
  int key_warps;
  int columns;
  int stages;
  int blocks;

  constexpr int threads() const { return row_warps * key_warps * kWarpSize; }
  constexpr int rows_per_warp() const { return rows / row_warps; }
  constexpr int keys_per_warp() const { return keys / key_warps; }
};

// Few rows are bound by memory. So warps divide keys rather than rows, and all of them take part in the GEMMs. Three
// CTAs per SM keep more bytes in flight, 32 KiB of K and V per stage. 128 rows are bound by GEMMs, and warps of 32 rows
// read shared memory half as often. Rows of 1 KiB leave room for one stage and few rows.
constexpr SplitTile split_tile(int element_bytes, int head_dim, SplitKind kind) {
  const int row_bytes = element_bytes * head_dim;
  const int widest = element_bytes == 4 ? 128 : 256;  // the most columns of O that fit registers
  const int columns = head_dim < widest ? head_dim : widest;
  const int keys = row_bytes <= 256 ? 64 : 32;
  const bool few = kind == SplitKind::kRows16 || kind == SplitKind::kExtended16;
  if (few && row_bytes <= 256) {
    return {.rows = 16,
            .keys = 64 * 256 / row_bytes,
            .row_warps = 1,
            .key_warps = 4,
            .columns = columns,
            .stages = 2,
            .blocks = 3};
  }
  if (few) {
    return {.rows = 16,
            .keys = keys,
            .row_warps = 1,
            .key_warps = 2,
            .columns = columns,
            .stages = row_bytes <= 512 ? 2 : 1,
            .blocks = 3};
  }
  if (row_bytes > 512) {
    return {.rows = 32, .keys = keys, .row_warps = 2, .key_warps = 1, .columns = columns, .stages = 1, .blocks = 2};
  }
  if (kind == SplitKind::kRows32) {
    return {.rows = 32,
            .keys = 64 * 256 / row_bytes,
            .row_warps = 2,
            .key_warps = 2,
            .columns = columns,
            .stages = 2,
            .blocks = 3};
  }
  return {.rows = kind == SplitKind::kRows128 ? 128 : 64,
          .keys = keys,
          .row_warps = 4,
          .key_warps = 1,
          .columns = columns,
          .stages = 2,
          .blocks = 2};
}

// Which kernels there are. Those of 32 rows pay where 64 are not as fast, and those of 128 where they fit registers.
constexpr bool has_split_kernel(int element_bytes, int head_dim, SplitKind kind) {
  const int row_bytes = element_bytes * head_dim;
  if (kind == SplitKind::kRows32) return row_bytes != 512;
  if (kind == SplitKind::kRows64 || kind == SplitKind::kExtended16) return row_bytes <= 512;
  return kind != SplitKind::kRows128 || (element_bytes == 2 && head_dim <= 128);
}

// The smallest kernel that holds the rows, or the largest that there is.
constexpr SplitKind split_kind(int element_bytes, int head_dim, int64_t rows, bool extended) {
  if (extended) {
    const bool holds = rows <= split_tile(element_bytes, head_dim, SplitKind::kExtended16).rows;
    const bool exists = has_split_kernel(element_bytes, head_dim, SplitKind::kExtended16);
    return holds && exists ? SplitKind::kExtended16 : SplitKind::kExtended64;
  }
  SplitKind kind = SplitKind::kRows16;
  for (const SplitKind next : {SplitKind::kRows32, SplitKind::kRows64, SplitKind::kRows128}) {
    const bool holds = rows <= split_tile(element_bytes, head_dim, kind).rows;
    if (!holds && has_split_kernel(element_bytes, head_dim, next)) kind = next;
  }
  return kind;
}

// Which kernels append new keys to a cache themselves: those that have registers for it. Before the others,
// common/append_kv.h runs.
constexpr bool appends_keys(int element_bytes, SplitKind kind) { return element_bytes == 2 && !is_extended(kind); }
// They do so up to this number of rows of k_new, v_new and q. With more rows, a launch of its own is a small part of
// the call.
inline constexpr int64_t kAppendedRows = 4096;

// Head dims that the kernel is compiled for. Smaller ones are zero-padded.
constexpr int split_head_dim_bucket(int element_bytes, int64_t head_dim) {
  if (head_dim <= 64) return 64;
  if (head_dim <= 128) return 128;
  return head_dim <= 256 || element_bytes == 4 ? 256 : 512;
}

// From how many keys on split-KV may pay, and the least keys that are worth a CTA.
inline constexpr int64_t kSplitKeys = 512;
inline constexpr int kLeastKeysOfBlock = 128;

// Up to these numbers of rows, each row has a CTA that combines its splits. They are so few that all CTAs run at once
// or, where a row has at least kManySplits splits, in a few waves. With more rows, each row has a warp.
inline constexpr int64_t kCombinedRows = 256;
inline constexpr int64_t kCombinedRowsOfManySplits = 1024;
inline constexpr int64_t kManySplits = 8;
// The warps of such a CTA. Where four warps can fetch all splits of a row at once, there are only four, because fewer
// warps start and merge faster.
inline constexpr int kCombineWarps = 8;
inline constexpr int kFewCombineWarps = 4;
inline constexpr int kRowsOfCombineCta = 4;  // where each row has a warp

// Splits that a warp fetches at once.
constexpr int splits_at_once(int columns) { return columns <= 128 ? 8 : 4; }
constexpr int splits_of_few_warps(int columns) { return kFewCombineWarps * splits_at_once(columns); }

// Up to this number of combine CTAs per SM, all of them run beside the CTAs that still read keys. They then execute
// their instructions once before they wait, so that these are cached (common/combine.cu).
inline constexpr int64_t kWarmUpBlocks = 2;

// Up to this number of queries, keys are split where SMs would be idle. With more queries, a result does not depend on
// the rest of the batch.
inline constexpr int64_t kSplitQueries = 512;

// The backward pass: the least keys that are worth a CTA that computes a partial dQ, and the CTAs of the dQ kernel per
// SM.
inline constexpr int64_t kLeastKeysOfDqSplit = 256;
inline constexpr int kDqBlocks = 2;

// Which dQ kernels can split keys: those that do not spill because of it. Calls that would take the BiasMask kernel of
// head dim 64 take the Extended one instead.
constexpr bool has_split_kv_dq_kernel(int element_bytes, int head_dim, Variant variant) {
  if (element_bytes == 2 && head_dim == 64 && variant == Variant::kBiasMask) return false;
  return element_bytes * head_dim <= 512;
}

// The rows of a partial dQ have whole groups of as many columns as a warp sums.
constexpr int64_t dq_split_columns(int64_t head_dim) { return (head_dim + 63) / 64 * 64; }

// Up to this number of packed rows, reading the keys bounds a call.
inline constexpr int64_t kSplitRows = 64;

}  // namespace flash_attn_ext::sm80

namespace flash_attn_ext::sm90 {

// The columns of memory for the partial O of a split. The combine kernel is compiled for these.
constexpr int split_columns(int columns) { return columns <= 64 ? 64 : columns <= 128 ? 128 : 256; }

}  // namespace flash_attn_ext::sm90
