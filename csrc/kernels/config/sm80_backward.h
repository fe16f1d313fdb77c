// The tables of the portable backward kernels. Rows of 2-byte elements are compiled for bfloat16 and float16, the
// others for float32; scale-only rows up to kLargestTf32HeadDim also with TF32. The plan names a row of each.
#pragma once

#include "kernels/config/sm80.h"

namespace flash_attn_ext::sm80 {

// Gradient kernels stage biases beside masks where shared memory has room for both. Others read them from memory.
constexpr bool gradient_stages_bias(int element_bytes, int head_dim) { return element_bytes == 2 && head_dim <= 128; }

struct DqConfig {
  int element_bytes;
  int head_dim;
  ScoreMode score = ScoreMode::kScaleOnly;
  TileShape tile;
  bool split_kv = false;             // may split the keys among CTAs: kernels that do not spill because of it
  bool materialises_scores = false;  // may materialise P and dS
  bool one_key_tile = false;         // K and V share a tile, because shared memory has no room for two

  bool operator==(const DqConfig&) const = default;
};

// S and dP are both live, so that a tile has fewer keys than in the forward pass.
// clang-format off
inline constexpr DqConfig kDqConfigs[] = {
    {.element_bytes = 2, .head_dim = 64, .tile = {.queries = 128, .keys = 64, .warps = 4, .columns = 64},
     .split_kv = true},
    {.element_bytes = 2, .head_dim = 96, .tile = {.queries = 64, .keys = 64, .warps = 4, .columns = 96},
     .split_kv = true},
    {.element_bytes = 2, .head_dim = 128, .tile = {.queries = 64, .keys = 64, .warps = 4, .columns = 128},
     .split_kv = true},
    {.element_bytes = 2, .head_dim = 192, .tile = {.queries = 64, .keys = 32, .warps = 4, .columns = 192},
     .split_kv = true, .materialises_scores = true},
    {.element_bytes = 2, .head_dim = 256, .tile = {.queries = 64, .keys = 32, .warps = 4, .columns = 256},
     .split_kv = true, .materialises_scores = true},

    {.element_bytes = 2, .head_dim = 64, .score = ScoreMode::kBiasMask,
     .tile = {.queries = 128, .keys = 64, .warps = 4, .columns = 64}, .materialises_scores = true},
    {.element_bytes = 2, .head_dim = 128, .score = ScoreMode::kBiasMask,
     .tile = {.queries = 64, .keys = 64, .warps = 4, .columns = 128}, .split_kv = true, .materialises_scores = true},

    // Generic rows of head dim 64 never materialise scores, but are slower without the branch
    // (docs/kernels/log/sm80_backward.md, "Dead ends").
    {.element_bytes = 2, .head_dim = 64, .score = ScoreMode::kGeneric,
     .tile = {.queries = 64, .keys = 64, .warps = 4, .columns = 64}, .split_kv = true, .materialises_scores = true},
    {.element_bytes = 2, .head_dim = 128, .score = ScoreMode::kGeneric,
     .tile = {.queries = 64, .keys = 64, .warps = 4, .columns = 128}, .split_kv = true, .materialises_scores = true},
    {.element_bytes = 2, .head_dim = 192, .score = ScoreMode::kGeneric,
     .tile = {.queries = 64, .keys = 32, .warps = 4, .columns = 192}, .split_kv = true, .materialises_scores = true},
    {.element_bytes = 2, .head_dim = 256, .score = ScoreMode::kGeneric,
     .tile = {.queries = 64, .keys = 32, .warps = 4, .columns = 256}, .split_kv = true, .materialises_scores = true},
    {.element_bytes = 2, .head_dim = 512, .score = ScoreMode::kGeneric,
     .tile = {.queries = 32, .keys = 16, .warps = 2, .columns = 256}},
    {.element_bytes = 2, .head_dim = 576, .score = ScoreMode::kGeneric,
     .tile = {.queries = 32, .keys = 16, .warps = 2, .columns = 192}, .one_key_tile = true},

    {.element_bytes = 4, .head_dim = 64, .tile = {.queries = 64, .keys = 64, .warps = 4, .columns = 64},
     .split_kv = true},
    {.element_bytes = 4, .head_dim = 128, .tile = {.queries = 64, .keys = 32, .warps = 4, .columns = 128},
     .split_kv = true},

    {.element_bytes = 4, .head_dim = 64, .score = ScoreMode::kGeneric,
     .tile = {.queries = 64, .keys = 64, .warps = 4, .columns = 64}, .split_kv = true, .materialises_scores = true},
    {.element_bytes = 4, .head_dim = 128, .score = ScoreMode::kGeneric,
     .tile = {.queries = 64, .keys = 32, .warps = 4, .columns = 128}, .split_kv = true},
    {.element_bytes = 4, .head_dim = 256, .score = ScoreMode::kGeneric,
     .tile = {.queries = 32, .keys = 16, .warps = 2, .columns = 256}},
};
// clang-format on

// The row whose tile the kernels of recomputed dS use (recomputed_scores.cuh). Head dims above 256 share one kernel,
// because each kernel takes long to compile.
constexpr int dscore_sums_row(int element_bytes, int64_t head_dim) {
  return find_row(kDqConfigs, element_bytes, head_dim <= 256 ? head_dim : 576, ScoreMode::kGeneric);
}

// The tile of a dK/dV CTA: `keys` rows of K and V stay, and tiles of `queries` rows of Q and dO stream past, in a
// pipeline of `stages`. Each warp owns keys / warps rows.
struct KeyStationaryTile {
  int keys;
  int queries;
  int warps;
  int stages;
  int columns;
  bool both;            // dK and dV in one launch; else their accumulators do not fit registers together
  int ctas_per_sm = 1;  // at least
};

struct DkdvConfig {
  int element_bytes;
  int head_dim;
  ScoreMode score = ScoreMode::kScaleOnly;
  KeyStationaryTile tile;
  bool materialises_scores = false;  // may materialise dS
  bool one_query_tile = false;       // Q and dO share a tile, because shared memory has no room for two

  bool operator==(const DkdvConfig&) const = default;
};

// clang-format off
inline constexpr DkdvConfig kDkdvConfigs[] = {
    {.element_bytes = 2, .head_dim = 64,
     .tile = {.keys = 128, .queries = 32, .warps = 4, .stages = 2, .columns = 64, .both = true}},
    {.element_bytes = 2, .head_dim = 96,
     .tile = {.keys = 64, .queries = 64, .warps = 4, .stages = 2, .columns = 96, .both = true},
     .materialises_scores = true},
    {.element_bytes = 2, .head_dim = 128,
     .tile = {.keys = 64, .queries = 64, .warps = 4, .stages = 2, .columns = 128, .both = true},
     .materialises_scores = true},

    {.element_bytes = 2, .head_dim = 64, .score = ScoreMode::kGeneric,
     .tile = {.keys = 64, .queries = 64, .warps = 4, .stages = 2, .columns = 64, .both = true},
     .materialises_scores = true},
    {.element_bytes = 2, .head_dim = 128, .score = ScoreMode::kGeneric,
     .tile = {.keys = 64, .queries = 32, .warps = 4, .stages = 2, .columns = 128, .both = true}},
    {.element_bytes = 2, .head_dim = 192, .score = ScoreMode::kGeneric,
     .tile = {.keys = 64, .queries = 32, .warps = 4, .stages = 2, .columns = 192, .both = false}},
    {.element_bytes = 2, .head_dim = 256, .score = ScoreMode::kGeneric,
     .tile = {.keys = 64, .queries = 32, .warps = 4, .stages = 1, .columns = 256, .both = false}},
    {.element_bytes = 2, .head_dim = 512, .score = ScoreMode::kGeneric,
     .tile = {.keys = 32, .queries = 16, .warps = 2, .stages = 1, .columns = 256, .both = false}},
    {.element_bytes = 2, .head_dim = 576, .score = ScoreMode::kGeneric,
     .tile = {.keys = 32, .queries = 16, .warps = 2, .stages = 1, .columns = 192, .both = false},
     .one_query_tile = true},

    {.element_bytes = 4, .head_dim = 64,
     .tile = {.keys = 64, .queries = 32, .warps = 4, .stages = 2, .columns = 64, .both = true},
     .materialises_scores = true},
    {.element_bytes = 4, .head_dim = 128,
     .tile = {.keys = 64, .queries = 32, .warps = 4, .stages = 1, .columns = 128, .both = true},
     .materialises_scores = true},

    {.element_bytes = 4, .head_dim = 64, .score = ScoreMode::kGeneric,
     .tile = {.keys = 64, .queries = 32, .warps = 4, .stages = 2, .columns = 64, .both = true},
     .materialises_scores = true},
    {.element_bytes = 4, .head_dim = 128, .score = ScoreMode::kGeneric,
     .tile = {.keys = 64, .queries = 32, .warps = 4, .stages = 1, .columns = 128, .both = true},
     .materialises_scores = true},
    {.element_bytes = 4, .head_dim = 256, .score = ScoreMode::kGeneric,
     .tile = {.keys = 32, .queries = 16, .warps = 2, .stages = 1, .columns = 256, .both = false}},
};
// clang-format on

// Scores are materialised in whole tiles of this many rows, or of a multiple of it. All rows of such a tile are written
// in the same columns.
inline constexpr int kMaterialisedRows = 64;
constexpr bool materialises_whole_tiles() {
  for (const DqConfig& config : kDqConfigs) {
    if (config.materialises_scores && config.tile.queries % kMaterialisedRows != 0) return false;
  }
  for (const DkdvConfig& config : kDkdvConfigs) {
    if (config.materialises_scores && config.tile.keys % kMaterialisedRows != 0) return false;
  }
  return true;
}
static_assert(materialises_whole_tiles());

// Up to these lengths and this head dim, one CTA computes dQ, dK and dV of a head. They are what fits its shared
// memory.
inline constexpr int64_t kFusedKeys = 256;
inline constexpr int64_t kFusedQueries = 256;
inline constexpr int kFusedHeadDim = 64;

// The tile of such a CTA: all keys stay, at most `keys`, and tiles of `queries` rows stream past. Each warp owns keys /
// warps rows. There are `dscores` tiles of dS. With one, another barrier separates the warps that read it from those
// that write the next one.
struct FusedConfig {
  int keys;
  int queries;
  int warps;
  int ctas_per_sm;  // at least
  int dscores;

  bool operator==(const FusedConfig&) const = default;
};

// The table of fused kernels, for bfloat16 and float16. A call takes the first row that holds its keys. A warp has 32
// rows, as in dK/dV, or 16 where a CTA would have only two warps. Three CTAs of that shape share an SM.
inline constexpr FusedConfig kFusedConfigs[] = {
    {.keys = 64, .queries = 32, .warps = 4, .ctas_per_sm = 3, .dscores = 2},
    {.keys = 128, .queries = 32, .warps = 4, .ctas_per_sm = 2, .dscores = 2},
    {.keys = 256, .queries = 32, .warps = 8, .ctas_per_sm = 1, .dscores = 1}};

// The tile of a CTA of a GEMM with materialised scores: rows x columns of the result, row_warps x column_warps warps,
// and `stages` of `step` inner rows in flight. An SM holds `ctas_per_sm` CTAs.
struct GemmTile {
  int rows;
  int columns;
  int step;
  int stages;
  int row_warps;
  int column_warps;
  int ctas_per_sm;
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
            .ctas_per_sm = head_dim <= 64 ? 3 : 2};
  if (head_dim <= 64)
    return {.rows = 128, .columns = 64, .step = 64, .stages = 3, .row_warps = 2, .column_warps = 2, .ctas_per_sm = 3};
  if (head_dim <= 128)
    return {
        .rows = 128, .columns = head_dim, .step = 64, .stages = 3, .row_warps = 2, .column_warps = 2, .ctas_per_sm = 2};
  if (head_dim <= 192)
    return {.rows = 128, .columns = 192, .step = 32, .stages = 4, .row_warps = 2, .column_warps = 2, .ctas_per_sm = 2};
  return {.rows = 128, .columns = 256, .step = 64, .stages = 2, .row_warps = 2, .column_warps = 4, .ctas_per_sm = 1};
}

}  // namespace flash_attn_ext::sm80
