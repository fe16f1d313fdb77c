// The tiles of the forward kernel that divides keys among blocks, with their reasons.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "kernels/tile_config.h"

namespace flash_attn_ext::sm80 {

// What a kernel is compiled for. The number is that of packed rows of a tile.
enum class SplitKind {
  kRows16,      // a positive scale, and nothing else that changes a score
  kRows32,      // the same
  kRows64,      // the same
  kRows128,     // the same
  kExtended16,  // everything
  kExtended64,  // everything
};

constexpr bool is_extended(SplitKind kind) { return kind == SplitKind::kExtended16 || kind == SplitKind::kExtended64; }

// A block: `rows` packed rows stay, tiles of `keys` stream past in `stages`. row_warps x key_warps warps: each owns
// rows / row_warps rows and keys / key_warps of a tile's keys. It computes `columns` columns of O. At least `blocks` of
// them share a multiprocessor.
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

// Few rows are bound by what memory delivers: warps divide keys rather than rows, so that all of them multiply, and
// three blocks keep more bytes on their way, 32 KiB of K and V per stage. 128 rows are bound by products: warps of 32
// rows read shared memory half as often. Rows of 1 KiB leave room for one stage and few rows.
constexpr SplitTile split_tile(int element_bytes, int head_dim, SplitKind kind) {
  const int row_bytes = element_bytes * head_dim;
  const int widest = element_bytes == 4 ? 128 : 256;  // of O, that fits registers
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

// Which kernels there are: those of 32 rows pay where 64 are not as fast, those of 128 where they fit registers.
constexpr bool has_split_kernel(int element_bytes, int head_dim, SplitKind kind) {
  const int row_bytes = element_bytes * head_dim;
  if (kind == SplitKind::kRows32) return row_bytes != 512;
  if (kind == SplitKind::kRows64 || kind == SplitKind::kExtended16) return row_bytes <= 512;
  return kind != SplitKind::kRows128 || (element_bytes == 2 && head_dim <= 128);
}

// The smallest that holds the rows, or the largest that there is.
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

// Which kernels put new keys into a cache themselves: those that have registers for it. Before the others runs
// common/append_kv.h.
constexpr bool appends_keys(int element_bytes, SplitKind kind) { return element_bytes == 2 && !is_extended(kind); }
// Up to so many rows of k_new, v_new and q: with more of them, a launch of its own is a small part of the call.
inline constexpr int64_t kAppendedRows = 4096;

// Head dims that it is compiled for; the tail of a smaller one is zeros.
constexpr int split_head_dim_bucket(int element_bytes, int64_t head_dim) {
  if (head_dim <= 64) return 64;
  if (head_dim <= 128) return 128;
  return head_dim <= 256 || element_bytes == 4 ? 256 : 512;
}

// From how many keys on dividing them may pay, and how many are worth a block.
inline constexpr int64_t kSplitKeys = 512;
inline constexpr int kLeastKeysOfBlock = 128;

// Rows that get a block each to join their parts: few enough that all blocks run at once, or, where a row has many
// parts, in a few turns. Of other rows each has a warp.
inline constexpr int64_t kJoinedRows = 256;
inline constexpr int64_t kJoinedRowsOfManyParts = 1024;
inline constexpr int64_t kManyParts = 8;
// Warps of such a block, and where four of them can fetch all parts at once, with fewer warps to start and to merge.
// (H100, us: 16 x 8k keys of one key head 33.9 and 31.9, 8 queries of 4k 13.6 and 13.3; 132 parts, 15.7 and 18.5.)
inline constexpr int kJoiningWarps = 8;
inline constexpr int kFewJoiningWarps = 4;
inline constexpr int kRowsOfJoiningBlock = 4;  // that have a warp each

// Parts that a warp fetches at once.
constexpr int parts_at_once(int columns) { return columns <= 128 ? 8 : 4; }
constexpr int parts_of_few_warps(int columns) { return kFewJoiningWarps * parts_at_once(columns); }

// Up to how many blocks for each multiprocessor that join parts are there while keys are still read, and go through
// their instructions once before they wait (common/combine.cu). (H100, keys and code cold, 8 key heads, us: one query
// of 4k keys 13.9 instead of 15.4, of 32k 52.3 and 54.1, of 4 x 2k 19.6 and 21.3; with 8 queries of 32k, 2 blocks for
// each multiprocessor, 55.8 and 57.4; with 4, one query of 16 x 8k of one key head, 36.5 and 35.8.)
inline constexpr int64_t kRehearsingBlocks = 2;

// Up to how many queries keys are divided where multiprocessors would be idle. With more, a result does not depend on
// the rest of the batch.
inline constexpr int64_t kSplitQueries = 512;

// The backward pass. How many keys are worth a block that computes a part of dQ, and how many blocks of the dQ kernel
// a multiprocessor holds.
inline constexpr int64_t kLeastKeysOfDqPart = 256;
inline constexpr int kDqBlocks = 2;

// Which dQ kernels can compute a part: those that do not spill because of it. Calls that would take the BiasMask kernel
// of head dim 64 take the Extended one.
constexpr bool has_divided_dq_kernel(int element_bytes, int head_dim, Variant variant) {
  if (element_bytes == 2 && head_dim == 64 && variant == Variant::kBiasMask) return false;
  return element_bytes * head_dim <= 512;
}

// A part's rows have whole groups of as many columns as a warp adds up.
constexpr int64_t dq_part_columns(int64_t head_dim) { return (head_dim + 63) / 64 * 64; }

// Up to how many packed rows a call is bound by reading its keys.
inline constexpr int64_t kSplitRows = 64;

}  // namespace flash_attn_ext::sm80

namespace flash_attn_ext::sm90 {

// Columns of memory for a part's O, of which the kernel that joins parts knows these.
constexpr int part_columns(int columns) { return columns <= 64 ? 64 : columns <= 128 ? 128 : 256; }

}  // namespace flash_attn_ext::sm90
