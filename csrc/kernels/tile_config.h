// The tile sizes of the GPU's attention kernels, with their reasons, and which kernels there are. tile_config_split.h
// has those of the kernel that divides keys.
#pragma once

#include <cstdint>

namespace flash_attn_ext {

// What forward, dK/dV and dQ kernels are compiled for.
enum class Variant {
  kPlain,     // a positive scale, and nothing else that changes a score
  kParts,     // the same for keys that are divided; sm90's forward only
  kShort,     // the same for few queries, in smaller tiles; forward only
  kSmall,     // the same in tiles so small that two blocks share a multiprocessor; sm90's forward only
  kTall,      // the same in tiles of more queries, for slow copies of keys and for windows; sm90's forward only
  kAllKeys,   // the same where one tile holds all keys; sm90's forward only
  kDropout,   // the same with dropout; not in sm80's backward
  kMask,      // the same with a boolean mask; sm90 only
  kBiasMask,  // the same with a bias, a mask or both; forward and dQ
  kModified,  // everything but a bias and a mask; sm90's backward only, above head dim 128
  kExtended,  // everything
};

}  // namespace flash_attn_ext

namespace flash_attn_ext::sm80 {

inline constexpr int kWarpSize = 32;

// Shared memory that every GPU of compute capability 8.0 and later has for a block (8.6, 8.9 and 12.0 have no more).
inline constexpr int kSharedBytes = 99 * 1024;

// Head dims that kernels are compiled for; the tail of a smaller one is zeros. Wider elements skip some, to keep the
// build short.
constexpr int head_dim_bucket(int element_bytes, int64_t head_dim) {
  const bool wide = element_bytes == 4;
  if (head_dim <= 64) return 64;
  if (head_dim <= 96 && !wide) return 96;
  if (head_dim <= 128) return 128;
  if (head_dim <= 192 && !wide) return 192;
  return head_dim <= 256 ? 256 : 512;
}

// Which kernels there are: of the general ones, Plain kernels pay most where they are used most. What has no kernel of
// its own takes the Extended one, which does everything, of the next larger head dim.
constexpr bool has_general_head_dim(int element_bytes, int head_dim) {
  return element_bytes == 4 ? head_dim == 64 || head_dim == 128 || head_dim == 256 : head_dim != 96;
}
constexpr bool has_forward_kernel(int element_bytes, int head_dim, Variant variant) {
  const bool common = element_bytes == 2 && (head_dim == 64 || head_dim == 128);
  if (variant == Variant::kShort) return element_bytes == 2 && head_dim == 64;
  if (variant == Variant::kDropout || variant == Variant::kBiasMask) return common;
  return variant == Variant::kPlain || has_general_head_dim(element_bytes, head_dim);
}
constexpr bool has_dq_kernel(int element_bytes, int head_dim, Variant variant) {
  if (variant == Variant::kBiasMask) return element_bytes == 2 && (head_dim == 64 || head_dim == 128);
  if (variant == Variant::kPlain) return element_bytes == 4 ? head_dim <= 128 : head_dim <= 256;
  return variant == Variant::kExtended && has_general_head_dim(element_bytes, head_dim);
}
constexpr bool has_dkdv_kernel(int element_bytes, int head_dim, Variant variant) {
  if (variant == Variant::kPlain) return head_dim <= 128;
  return variant == Variant::kExtended && has_general_head_dim(element_bytes, head_dim);
}
// The head dim of the kernel that a variant takes.
constexpr int bucket_of_variant(int element_bytes, int head_dim, Variant variant) {
  const bool has_own = variant == Variant::kPlain || has_general_head_dim(element_bytes, head_dim);
  return has_own ? head_dim : 128;
}

// Single TF32 products are allowed, never asked for: Plain kernels of the head dims that are used most.
inline constexpr int kLargestTf32HeadDim = 128;

// The kernels that short calls take compute rows in which a NaN came out again by themselves: the launch of a repair
// kernel takes about 2 us, 15 % of a forward pass of 8 x 16 heads of 197 tokens at head dim 64.
constexpr bool repairs_in_kernel(int head_dim, Variant variant) {
  return variant == Variant::kShort || (head_dim == 64 && variant == Variant::kPlain);
}

constexpr int64_t num_tiles(int64_t rows, int tile_rows) { return (rows + tile_rows - 1) / tile_rows; }

// Blocks that share a tile of rows; one even where there is no column, since it also writes the LSE.
constexpr int64_t num_slices(int64_t head_dim, int columns) {
  return head_dim <= columns ? 1 : (head_dim + columns - 1) / columns;
}

// A forward or dQ block: `queries` rows of Q stay, tiles of `keys` stream past. Each warp owns queries / warps rows.
// The block computes `columns` columns of the result; where that is less than the head dim, several blocks share a tile
// and each computes the scores for itself.
struct QueryStationaryTile {
  int queries;
  int keys;
  int warps;
  int columns;
  int blocks = 1;  // on a multiprocessor, at least; 1 leaves a thread all the registers that it can have
  int stages = 1;  // tiles of K and V in flight; the dQ kernel has one
};

// Up to how many queries the Short forward kernel is faster.
inline constexpr int64_t kShortForwardQueries = 64;
inline constexpr int64_t kShortCausalQueries = 448;  // of larger tiles more is hidden

// The kernel that goes through whole heads: from how many keys on it is faster (up to there a narrow last tile is), and
// up to how many rows it holds. Blocks on a multiprocessor.
inline constexpr int64_t kHeadsKeys = 81;
inline constexpr int kHeadsRows = 128;
inline constexpr int kHeadsHeadDim = 64;
inline constexpr int kHeadsBlocks = 2;

// 32 rows per warp halve what each product reads from shared memory, as long as O (rows x head_dim) and S (rows x keys)
// fit 255 registers; beyond that, 16 rows. Shared memory lets two blocks or more share a multiprocessor, so that one
// computes while the other waits, and holds Extended kernels' biases and masks beside Q, K and V. Short kernels spend
// most of their time on starting and ending: five small blocks hide each other's. A second stage of K and V pays at
// head dim 64.
constexpr QueryStationaryTile forward_tile(int element_bytes, int head_dim, Variant variant) {
  const bool extended = variant == Variant::kExtended;
  if (element_bytes == 4) {
    if (head_dim <= 64) return {.queries = extended ? 64 : 128, .keys = 64, .warps = 4, .columns = head_dim};
    if (head_dim <= 128) return {.queries = extended ? 64 : 128, .keys = 32, .warps = 4, .columns = head_dim};
    if (extended) return {.queries = 32, .keys = 16, .warps = 2, .columns = head_dim};
    return {.queries = 64, .keys = 16, .warps = 4, .columns = head_dim};
  }
  if (variant == Variant::kShort) return {.queries = 64, .keys = 64, .warps = 4, .columns = head_dim, .blocks = 5};
  if (head_dim <= 64 && variant == Variant::kPlain)
    return {.queries = 128, .keys = 64, .warps = 4, .columns = head_dim, .stages = 2};
  if (head_dim <= 128) return {.queries = 128, .keys = 64, .warps = 4, .columns = head_dim};
  if (head_dim <= 192) return {.queries = 64, .keys = 64, .warps = 4, .columns = head_dim};
  if (head_dim <= 256) return {.queries = 64, .keys = extended ? 32 : 64, .warps = 4, .columns = head_dim};
  return {.queries = 32, .keys = 32, .warps = 2, .columns = 256};
}

// S and dP are both alive: fewer keys at a time.
constexpr QueryStationaryTile backward_dq_tile(int element_bytes, int head_dim, Variant variant) {
  const bool extended = variant == Variant::kExtended;
  if (element_bytes == 4) {
    if (head_dim <= 64) return {.queries = 64, .keys = 64, .warps = 4, .columns = head_dim};
    if (head_dim <= 128) return {.queries = 64, .keys = 32, .warps = 4, .columns = head_dim};
    return {.queries = 32, .keys = 16, .warps = 2, .columns = head_dim};
  }
  if (head_dim <= 64) return {.queries = extended ? 64 : 128, .keys = 64, .warps = 4, .columns = head_dim};
  if (head_dim <= 128) return {.queries = 64, .keys = 64, .warps = 4, .columns = head_dim};
  if (head_dim <= 256) return {.queries = 64, .keys = 32, .warps = 4, .columns = head_dim};
  return {.queries = 32, .keys = 16, .warps = 2, .columns = 256};
}

// Which kernels of forward mode there are.
constexpr bool has_tangent_kernel(int element_bytes, int head_dim) {
  return element_bytes == 4 ? head_dim == 64 || head_dim == 128 : head_dim <= 256;
}

// S and S' are both alive, as in the dQ kernel, and each tile comes with its tangent. Stages: K and V have one each, or
// take turns where two would not fit.
constexpr QueryStationaryTile tangent_tile(int element_bytes, int head_dim) {
  if (element_bytes == 4) {
    if (head_dim <= 64) return {.queries = 64, .keys = 32, .warps = 4, .columns = head_dim, .stages = 2};
    return {.queries = 64, .keys = 32, .warps = 4, .columns = head_dim};
  }
  if (head_dim <= 64) return {.queries = 128, .keys = 64, .warps = 4, .columns = head_dim, .stages = 2};
  if (head_dim <= 128) return {.queries = 128, .keys = 32, .warps = 4, .columns = head_dim, .stages = 2};
  return {.queries = 64, .keys = 32, .warps = 4, .columns = head_dim, .stages = head_dim <= 192 ? 2 : 1};
}

// Gradient kernels stage biases beside masks where shared memory has room for both. Others read them from memory.
constexpr bool gradient_stages_bias(int element_bytes, int head_dim) { return element_bytes == 2 && head_dim <= 128; }

// A dK/dV block: `keys` rows of K and V stay, tiles of `queries` rows of Q and dO stream past, `stages` of them in
// flight. Each warp owns keys / warps rows.
struct KeyStationaryTile {
  int keys;
  int queries;
  int warps;
  int stages;
  int columns;
  bool both;       // dK and dV in one launch; else their accumulators do not fit into registers together
  int blocks = 1;  // as above
};

constexpr KeyStationaryTile backward_dkdv_tile(int element_bytes, int head_dim, Variant variant) {
  const bool extended = variant == Variant::kExtended;
  if (element_bytes == 4) {
    if (head_dim <= 64) return {.keys = 64, .queries = 32, .warps = 4, .stages = 2, .columns = head_dim, .both = true};
    if (head_dim <= 128) return {.keys = 64, .queries = 32, .warps = 4, .stages = 1, .columns = head_dim, .both = true};
    return {.keys = 32, .queries = 16, .warps = 2, .stages = 1, .columns = head_dim, .both = false};
  }
  if (head_dim <= 64 && extended)
    return {.keys = 64, .queries = 64, .warps = 4, .stages = 2, .columns = head_dim, .both = true};
  if (head_dim <= 64) return {.keys = 128, .queries = 32, .warps = 4, .stages = 2, .columns = head_dim, .both = true};
  if (head_dim <= 128)
    return {.keys = 64, .queries = extended ? 32 : 64, .warps = 4, .stages = 2, .columns = head_dim, .both = true};
  if (head_dim <= 192) return {.keys = 64, .queries = 32, .warps = 4, .stages = 2, .columns = head_dim, .both = false};
  if (head_dim <= 256) return {.keys = 64, .queries = 32, .warps = 4, .stages = 1, .columns = head_dim, .both = false};
  return {.keys = 32, .queries = 16, .warps = 2, .stages = 1, .columns = 256, .both = false};
}

// Which kernels store scores for others in calls of a variant (plan/sm80_backward.cpp). In Plain ones dK/dV where both
// fit registers, dQ beyond that; writing and reading scores takes longer than 16-bit products of head dims up to 64.
// What changes a score costs dK/dV more, since its rows are not those of biases, masks and draws. So 16-bit scores that
// change are computed once: by dQ, or at head dims up to 64 by dK/dV where dQ has no BiasMask kernel.
constexpr bool dkdv_stores_scores(int element_bytes, int64_t head_dim, Variant variant) {
  if (element_bytes == 4) return head_dim <= 128;
  if (variant == Variant::kPlain) return head_dim > 64 && head_dim <= 128;
  return variant == Variant::kExtended && head_dim <= 64;
}
constexpr bool dq_stores_scores(int element_bytes, int64_t head_dim, Variant variant) {
  const int beyond = variant == Variant::kPlain ? 128 : variant == Variant::kExtended ? 64 : 0;
  return element_bytes == 2 && head_dim > beyond && head_dim <= 256;
}

// Kernels that store scores for others do so in whole tiles of this many rows, or of a multiple of it: all rows of such
// a tile are written in the same columns.
inline constexpr int kStoredRows = 64;
constexpr bool stores_whole_tiles(Variant variant) {
  return backward_dkdv_tile(2, 64, variant).keys % kStoredRows == 0 &&
         backward_dkdv_tile(2, 128, variant).keys % kStoredRows == 0 &&
         backward_dkdv_tile(4, 64, variant).keys % kStoredRows == 0 &&
         backward_dkdv_tile(4, 128, variant).keys % kStoredRows == 0 &&
         backward_dq_tile(2, 64, variant).queries % kStoredRows == 0 &&
         backward_dq_tile(2, 128, variant).queries % kStoredRows == 0 &&
         backward_dq_tile(2, 192, variant).queries % kStoredRows == 0 &&
         backward_dq_tile(2, 256, variant).queries % kStoredRows == 0;
}
static_assert(stores_whole_tiles(Variant::kPlain) && stores_whole_tiles(Variant::kBiasMask) &&
              stores_whole_tiles(Variant::kExtended));

// Up to which lengths and head dim one block computes dQ, dK and dV of a head: what fits its shared memory.
inline constexpr int64_t kFusedKeys = 256;
inline constexpr int64_t kFusedQueries = 256;
inline constexpr int kFusedHeadDim = 64;
inline constexpr int64_t kFusedPairs = 128;  // at least, of grouped heads: about a GPU's multiprocessors

// Such a block: all keys stay, at most `keys`, and tiles of `queries` rows stream past. Each warp owns keys / warps
// rows. `dscores` tiles of dS: with one, another barrier separates those who read it from those who write the next.
struct FusedTile {
  int keys;
  int queries;
  int warps;
  int blocks;  // as above
  int dscores;
};

// 32 rows per warp, as in dK/dV; 16 where a block would have only two warps; three such blocks share a multiprocessor.
constexpr FusedTile backward_fused_tile(int keys) {
  if (keys <= 64) return {.keys = 64, .queries = 32, .warps = 4, .blocks = 3, .dscores = 2};
  if (keys <= 128) return {.keys = 128, .queries = 32, .warps = 4, .blocks = 2, .dscores = 2};
  return {.keys = 256, .queries = 32, .warps = 8, .blocks = 1, .dscores = 1};
}

// A block of a product with stored scores: rows x columns of the result, `row_warps` x `column_warps` warps, `stages`
// of `step` inner rows in flight, `blocks` of them on a multiprocessor.
struct ProductTile {
  int rows;
  int columns;
  int step;
  int stages;
  int row_warps;
  int column_warps;
  int blocks;
};

// 64 rows per warp: of the shapes whose sums fit into registers, the nearly square ones read the least shared memory a
// product, and that bounds mma.sync before its own rate does; float32 operands are split the fewest times too. Where
// one block fills the registers, short steps keep more of the copies in flight in the same 99 KiB.
constexpr ProductTile product_tile(int element_bytes, int head_dim) {
  if (element_bytes == 4)
    return {.rows = 128,
            .columns = head_dim,
            .step = 16,
            .stages = 6,
            .row_warps = 2,
            .column_warps = 2,
            .blocks = head_dim <= 64 ? 3 : 2};
  if (head_dim <= 64)
    return {.rows = 128, .columns = 64, .step = 64, .stages = 3, .row_warps = 2, .column_warps = 2, .blocks = 3};
  if (head_dim <= 128)
    return {.rows = 128, .columns = head_dim, .step = 64, .stages = 3, .row_warps = 2, .column_warps = 2, .blocks = 2};
  if (head_dim <= 192)
    return {.rows = 128, .columns = 192, .step = 32, .stages = 4, .row_warps = 2, .column_warps = 2, .blocks = 2};
  return {.rows = 128, .columns = 256, .step = 64, .stages = 2, .row_warps = 2, .column_warps = 4, .blocks = 1};
}

}  // namespace flash_attn_ext::sm80
