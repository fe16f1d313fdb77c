// What the portable attention kernels, for any GPU with tensor cores, are compiled for: which kernels there are, and
// their tiles, with reasons. config/split.h has the same for the split-KV kernel.
#pragma once

#include <cstdint>

namespace flash_attn_ext {

// The variants of forward, dK/dV and dQ kernels: what may change a score, and, for some, the shape of the tiles.
enum class Variant {
  kPlain,       // scale only: a positive scale, and nothing else that changes a score
  kSplitKv,     // scale only, split-KV; sm90's forward only
  kShort,       // scale only, in smaller tiles for few queries; forward only
  kSmall,       // scale only, in tiles so small that two CTAs share an SM; sm90's forward only
  kTall,        // scale only, in tiles of more queries, for slow loads of keys and for windows; sm90's forward only
  kSingleTile,  // scale only, where one tile holds all keys; sm90's forward only
  kDropout,     // scale and dropout; not in sm80's backward
  kMask,        // scale and a boolean mask; sm90 only
  kBiasMask,    // scale and a bias, a mask or both; forward and dQ
  kModified,    // generic without bias and mask; sm90's backward only, above head dim 128
  kExtended,    // generic: everything may change a score
};

}  // namespace flash_attn_ext

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
  return head_dim <= 256 ? 256 : 512;
}

// Which kernels there are. Plain kernels pay most at the head dims that are used most. A variant without a kernel of
// its own takes the Extended kernel of the next larger head dim, which does everything.
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

// Callers may allow single TF32 GEMMs, but never require them. So only Plain kernels of the head dims that are used
// most have them.
inline constexpr int kLargestTf32HeadDim = 128;

// The kernels that short calls take recompute rows with a NaN themselves, because the launch of a repair kernel would
// be a large part of such a call (docs/kernels/log/sm80.md, "Rooms, one plan, fewer kernels").
constexpr bool repairs_in_kernel(int head_dim, Variant variant) {
  return variant == Variant::kShort || (head_dim == 64 && variant == Variant::kPlain);
}

constexpr int64_t num_tiles(int64_t rows, int tile_rows) { return (rows + tile_rows - 1) / tile_rows; }

// CTAs that share a tile of rows. There is one even if there is no column, because it also writes the LSE.
constexpr int64_t num_slices(int64_t head_dim, int columns) {
  return head_dim <= columns ? 1 : (head_dim + columns - 1) / columns;
}

// The tile of a forward or dQ CTA: `queries` rows of Q stay, and tiles of `keys` stream past. Each warp owns queries /
// warps rows. The CTA computes `columns` columns of the result. Where these are fewer than the head dim, several CTAs
// share a tile, and each computes the scores again.
struct QueryStationaryTile {
  int queries;
  int keys;
  int warps;
  int columns;
  int blocks = 1;  // CTAs per SM, at least; 1 leaves a thread all the registers that it can have
  int stages = 1;  // tiles of K and V in flight; the dQ kernel has one
};

// Up to this number of queries the Short forward kernel is faster.
inline constexpr int64_t kShortForwardQueries = 64;
inline constexpr int64_t kShortCausalQueries = 448;  // causality hides more of larger tiles

// The whole-heads kernel, whose CTAs have all keys of a head at once: from how many keys on it is faster (with fewer, a
// narrow last tile of the other kernel is), how many rows it holds at most, its head dim, and its CTAs per SM.
inline constexpr int64_t kHeadsKeys = 81;
inline constexpr int kHeadsRows = 128;
inline constexpr int kHeadsHeadDim = 64;
inline constexpr int kHeadsBlocks = 2;

// A warp has 32 rows, which halve what each GEMM reads from shared memory, as long as O (rows x head_dim) and S (rows x
// keys) fit 255 registers. Beyond that it has 16. Shared memory has room for two CTAs per SM or more, so that one
// computes while the other waits, and for the biases and masks of Extended kernels beside Q, K and V. Short kernels
// spend most of their time in prologue and epilogue, which five small CTAs per SM hide from each other. A second stage
// of K and V pays at head dim 64.
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

// S and dP are both live, so that a tile has fewer keys.
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

// S and S' are both live, as S and dP in the dQ kernel, and each tile comes with its tangent. With two stages K and V
// have one each. Where two do not fit, K and V share one.
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

// The tile of a dK/dV CTA: `keys` rows of K and V stay, and tiles of `queries` rows of Q and dO stream past, in a
// pipeline of `stages`. Each warp owns keys / warps rows.
struct KeyStationaryTile {
  int keys;
  int queries;
  int warps;
  int stages;
  int columns;
  bool both;       // dK and dV in one launch; else their accumulators do not fit registers together
  int blocks = 1;  // CTAs per SM, at least
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

// Which kernel materialises scores for the other one, in calls of a variant (plan/sm80_backward.cpp). In Plain calls
// dK/dV does where both of its accumulators fit registers, and dQ above that. At head dims up to 64 neither does,
// because writing and reading scores takes longer than the 16-bit GEMMs that compute them again. What changes a score
// costs dK/dV more, because its rows are not those of biases, masks and draws. So where more than a scale changes
// 16-bit scores, these are computed once: by dQ, or, at head dims up to 64 where dQ has no BiasMask kernel, by dK/dV.
constexpr bool dkdv_materialises_scores(int element_bytes, int64_t head_dim, Variant variant) {
  if (element_bytes == 4) return head_dim <= 128;
  if (variant == Variant::kPlain) return head_dim > 64 && head_dim <= 128;
  return variant == Variant::kExtended && head_dim <= 64;
}
constexpr bool dq_materialises_scores(int element_bytes, int64_t head_dim, Variant variant) {
  const int beyond = variant == Variant::kPlain ? 128 : variant == Variant::kExtended ? 64 : 0;
  return element_bytes == 2 && head_dim > beyond && head_dim <= 256;
}

// Scores are materialised in whole tiles of this many rows, or of a multiple of it. All rows of such a tile are written
// in the same columns.
inline constexpr int kMaterialisedRows = 64;
constexpr bool stores_whole_tiles(Variant variant) {
  return backward_dkdv_tile(2, 64, variant).keys % kMaterialisedRows == 0 &&
         backward_dkdv_tile(2, 128, variant).keys % kMaterialisedRows == 0 &&
         backward_dkdv_tile(4, 64, variant).keys % kMaterialisedRows == 0 &&
         backward_dkdv_tile(4, 128, variant).keys % kMaterialisedRows == 0 &&
         backward_dq_tile(2, 64, variant).queries % kMaterialisedRows == 0 &&
         backward_dq_tile(2, 128, variant).queries % kMaterialisedRows == 0 &&
         backward_dq_tile(2, 192, variant).queries % kMaterialisedRows == 0 &&
         backward_dq_tile(2, 256, variant).queries % kMaterialisedRows == 0;
}
static_assert(stores_whole_tiles(Variant::kPlain) && stores_whole_tiles(Variant::kBiasMask) &&
              stores_whole_tiles(Variant::kExtended));

// Up to these lengths and this head dim, one CTA computes dQ, dK and dV of a head. They are what fits its shared
// memory.
inline constexpr int64_t kFusedKeys = 256;
inline constexpr int64_t kFusedQueries = 256;
inline constexpr int kFusedHeadDim = 64;
inline constexpr int64_t kFusedPairs = 128;  // the least KV groups where heads are grouped: about a GPU's SMs

// The tile of such a CTA: all keys stay, at most `keys`, and tiles of `queries` rows stream past. Each warp owns keys /
// warps rows. There are `dscores` tiles of dS. With one, another barrier separates the warps that read it from those
// that write the next one.
struct FusedTile {
  int keys;
  int queries;
  int warps;
  int blocks;  // CTAs per SM, at least
  int dscores;
};

// A warp has 32 rows, as in dK/dV, or 16 where a CTA would have only two warps. Three CTAs of that shape share an SM.
constexpr FusedTile backward_fused_tile(int keys) {
  if (keys <= 64) return {.keys = 64, .queries = 32, .warps = 4, .blocks = 3, .dscores = 2};
  if (keys <= 128) return {.keys = 128, .queries = 32, .warps = 4, .blocks = 2, .dscores = 2};
  return {.keys = 256, .queries = 32, .warps = 8, .blocks = 1, .dscores = 1};
}

// The tile of a CTA of a GEMM with materialised scores: rows x columns of the result, row_warps x column_warps warps,
// and `stages` of `step` inner rows in flight. An SM holds `blocks` CTAs.
struct GemmTile {
  int rows;
  int columns;
  int step;
  int stages;
  int row_warps;
  int column_warps;
  int blocks;
};

// A warp has 64 rows. Of the shapes whose accumulators fit registers, the nearly square ones read the least shared
// memory for each GEMM, which bounds mma.sync before its own rate does. They also split float32 operands the fewest
// times. Where one CTA fills the registers, short steps keep more of the copies in flight in the same 99 KiB.
constexpr GemmTile gemm_tile(int element_bytes, int head_dim) {
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
