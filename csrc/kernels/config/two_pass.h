// The table of Hopper's two-pass backward kernels, with reasons.
#pragma once

#include "kernels/config/sm90.h"
#include "kernels/config/tables.h"

namespace flash_attn_ext::sm90 {

inline constexpr HeadDims kLargestTwoPassHeadDims = {576, 512};

// The two-pass backward is for larger head dims and, up to head dim 128, for what the key-stationary kernel lacks: most
// gradients of biases, generic scores, and a mask or a bias with few queries. The dQ kernel
// materialises P and dS, and the GEMM kernel computes dV and dK from them. A dQ CTA has 64 stationary queries per
// consumer warpgroup, and tiles of 64 keys stream past in pipelines, with those of a bias beside K. S of the next tile
// is computed while dQ is, so that K needs two stages.
//
// Above head dim 256 the accumulators of dQ do not fit beside those of S and dP. The score kernel then only
// materialises P and dS, and dQ is a GEMM of materialised tiles, as dK and dV are.
struct TwoPassConfig {
  HeadDims dims;
  ScoreMode score = ScoreMode::kScaleOnly;
  int k_stages;
  int v_stages;
  // dP of the next tile is computed while dQ is, too, and dQ overlaps P of the next tile. That is faster where
  // registers hold it all, and shared memory a third stage (docs/kernels/log/sm90_backward.md, "Figures behind plans").
  bool dp_ahead = false;
  // The score kernel runs instead of the dQ kernel. Slices of 64 columns of all operands stream through k_stages
  // stages.
  bool dq_from_tiles = false;

  // Registers of a producer thread, which may have to look up tiles of a mask, and of a consumer thread. One of the
  // former and two of the latter are 504.
  constexpr int producer_registers() const {
    if (score == ScoreMode::kMask || score == ScoreMode::kGenericWithoutBias) return 40;
    return score == ScoreMode::kBiasMask || score == ScoreMode::kGeneric ? 72 : 24;
  }
  constexpr int consumer_registers() const { return 252 - producer_registers() / 2; }

  bool operator==(const TwoPassConfig&) const = default;
};

// The table of dQ kernels: each row is compiled once for bfloat16 and once for float16. The plan names a row. Rows
// stand in the order of their head dims, the cheapest first, and a call takes the first head dims that hold its own. At
// head dims up to 128, scale-only calls take the key-stationary kernel, or generic rows where its weights may vanish.
// Above, Q, dO, K and V leave no shared memory for a bias. The last row takes every head dim above 256, because it
// computes only as many slices and column parts as a call has.
inline constexpr TwoPassConfig kTwoPassConfigs[] = {
    {.dims = {64, 64}, .score = ScoreMode::kMask, .k_stages = 3, .v_stages = 2},
    {.dims = {64, 64}, .score = ScoreMode::kBiasMask, .k_stages = 3, .v_stages = 2},
    {.dims = {64, 64}, .score = ScoreMode::kGeneric, .k_stages = 3, .v_stages = 2},
    {.dims = {128, 128}, .score = ScoreMode::kMask, .k_stages = 3, .v_stages = 2},
    {.dims = {128, 128}, .score = ScoreMode::kBiasMask, .k_stages = 3, .v_stages = 2},
    {.dims = {128, 128}, .score = ScoreMode::kGeneric, .k_stages = 3, .v_stages = 2},
    {.dims = {192, 128}, .k_stages = 4, .v_stages = 3, .dp_ahead = true},
    {.dims = {192, 128}, .score = ScoreMode::kMask, .k_stages = 4, .v_stages = 3},
    {.dims = {192, 128}, .score = ScoreMode::kGenericWithoutBiasMask, .k_stages = 4, .v_stages = 3},
    {.dims = {192, 128}, .score = ScoreMode::kGenericWithoutBias, .k_stages = 4, .v_stages = 3},
    {.dims = {192, 192}, .k_stages = 2, .v_stages = 2},
    {.dims = {192, 192}, .score = ScoreMode::kMask, .k_stages = 2, .v_stages = 2},
    {.dims = {192, 192}, .score = ScoreMode::kGenericWithoutBiasMask, .k_stages = 2, .v_stages = 2},
    {.dims = {192, 192}, .score = ScoreMode::kGenericWithoutBias, .k_stages = 2, .v_stages = 2},
    {.dims = {256, 256}, .k_stages = 2, .v_stages = 1},
    {.dims = {256, 256}, .score = ScoreMode::kMask, .k_stages = 2, .v_stages = 1},
    {.dims = {256, 256}, .score = ScoreMode::kGenericWithoutBiasMask, .k_stages = 2, .v_stages = 1},
    {.dims = {256, 256}, .score = ScoreMode::kGenericWithoutBias, .k_stages = 2, .v_stages = 1},
    {.dims = kLargestTwoPassHeadDims, .k_stages = 7, .v_stages = 0, .dq_from_tiles = true},
};

// The tile of a CTA of the GEMM kernel: 64 keys per consumer warpgroup stay, and tiles of 64 queries stream past, in as
// many stages as shared memory holds. The more keys a CTA has, the fewer bytes L2 delivers for each GEMM. So there are
// as many warpgroups as accumulators leave registers for.
struct GemmTile {
  int warpgroups;  // consumers; the producer is one more
  int stages;
  int producer_registers;
  int consumer_registers;

  constexpr int keys() const { return 64 * warpgroups; }
  constexpr int flags() const { return 2 * warpgroups; }  // non-finite flags: one for 32 keys
};
constexpr GemmTile gemm_tile(HeadDims dims) {
  const int columns = dims.qk > dims.v ? dims.qk : dims.v;
  if (columns <= 128)
    return {.warpgroups = 4, .stages = columns <= 64 ? 5 : 4, .producer_registers = 64, .consumer_registers = 104};
  return {.warpgroups = 3, .stages = 4, .producer_registers = 32, .consumer_registers = 160};
}

// The most columns of a result that a CTA of a GEMM kernel computes, for which its registers have sums. Wider results
// are divided into column parts.
inline constexpr int kColumnsOfPart = 256;
constexpr int num_column_parts(int64_t head_dim) {
  return static_cast<int>(attention::ceil_div(head_dim, kColumnsOfPart));
}

}  // namespace flash_attn_ext::sm90
