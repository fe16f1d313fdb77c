// The table of the portable forward kernels. Rows of 2-byte elements are compiled for bfloat16 and float16, the others
// for float32; scale-only rows up to kLargestTf32HeadDim also with TF32. The plan names a row.
#pragma once

#include "kernels/config/sm80.h"

namespace flash_attn_ext::sm80 {

struct ForwardConfig {
  int element_bytes;
  int head_dim;
  ScoreMode score = ScoreMode::kScaleOnly;
  TileShape tile;
  // Recomputes rows with a NaN itself, because the launch of a repair kernel would be a large part of a short call
  // (docs/kernels/log/sm80.md, "Rooms, one plan, fewer kernels", and log/sm80_forward.md, "Bias-stationary kernels
  // without a bias").
  bool repairs_in_kernel = false;
  // Such a kernel spends most of its time in prologue and epilogue, which five small CTAs per SM hide from each other.
  // It keeps the addresses of copies, and asks for no interval of keys where all are visible.
  bool for_few_queries = false;
  // The warp's first row, instead of the CTA's, decides up to where tiles are unmasked. Under causality it sees more
  // keys. Kernels that have a loop body for partly masked tiles gain nothing from it.
  bool unmasked_by_warp = false;

  bool operator==(const ForwardConfig&) const = default;
};

// A warp has 32 rows, which halve what each GEMM reads from shared memory, as long as O (rows x head_dim) and S (rows x
// keys) fit 255 registers. Beyond that it has 16. Shared memory has room for two CTAs per SM or more, so that one
// computes while the other waits, and for the biases and masks of generic kernels beside Q, K and V. A second stage of
// K and V pays at head dim 64. Score modes have rows of their own at the head dims that are used most.
// clang-format off
inline constexpr ForwardConfig kForwardConfigs[] = {
    {.element_bytes = 2, .head_dim = 64, .tile = {.queries = 128, .keys = 64, .warps = 4, .columns = 64, .stages = 2},
     .repairs_in_kernel = true},
    {.element_bytes = 2, .head_dim = 64,
     .tile = {.queries = 64, .keys = 64, .warps = 4, .columns = 64, .ctas_per_sm = 5},
     .repairs_in_kernel = true, .for_few_queries = true},
    {.element_bytes = 2, .head_dim = 96, .tile = {.queries = 128, .keys = 64, .warps = 4, .columns = 96}},
    {.element_bytes = 2, .head_dim = 128, .tile = {.queries = 128, .keys = 64, .warps = 4, .columns = 128},
     .unmasked_by_warp = true},
    {.element_bytes = 2, .head_dim = 192, .tile = {.queries = 64, .keys = 64, .warps = 4, .columns = 192},
     .repairs_in_kernel = true},
    {.element_bytes = 2, .head_dim = 256, .tile = {.queries = 64, .keys = 64, .warps = 4, .columns = 256}},
    {.element_bytes = 2, .head_dim = 512, .tile = {.queries = 32, .keys = 32, .warps = 2, .columns = 256}},

    {.element_bytes = 2, .head_dim = 64, .score = ScoreMode::kDropout,
     .tile = {.queries = 128, .keys = 64, .warps = 4, .columns = 64}},
    {.element_bytes = 2, .head_dim = 128, .score = ScoreMode::kDropout,
     .tile = {.queries = 128, .keys = 64, .warps = 4, .columns = 128}},

    {.element_bytes = 2, .head_dim = 64, .score = ScoreMode::kBiasMask,
     .tile = {.queries = 128, .keys = 64, .warps = 4, .columns = 64}},
    {.element_bytes = 2, .head_dim = 64, .score = ScoreMode::kBiasMask,
     .tile = {.queries = 64, .keys = 64, .warps = 4, .columns = 64, .ctas_per_sm = 4},
     .for_few_queries = true},
    {.element_bytes = 2, .head_dim = 128, .score = ScoreMode::kBiasMask,
     .tile = {.queries = 128, .keys = 64, .warps = 4, .columns = 128}},

    {.element_bytes = 2, .head_dim = 64, .score = ScoreMode::kGeneric,
     .tile = {.queries = 128, .keys = 64, .warps = 4, .columns = 64}},
    {.element_bytes = 2, .head_dim = 128, .score = ScoreMode::kGeneric,
     .tile = {.queries = 128, .keys = 64, .warps = 4, .columns = 128}},
    {.element_bytes = 2, .head_dim = 192, .score = ScoreMode::kGeneric,
     .tile = {.queries = 64, .keys = 64, .warps = 4, .columns = 192}},
    {.element_bytes = 2, .head_dim = 256, .score = ScoreMode::kGeneric,
     .tile = {.queries = 64, .keys = 32, .warps = 4, .columns = 256}},
    {.element_bytes = 2, .head_dim = 512, .score = ScoreMode::kGeneric,
     .tile = {.queries = 32, .keys = 32, .warps = 2, .columns = 256}},
    {.element_bytes = 2, .head_dim = 576, .score = ScoreMode::kGeneric,
     .tile = {.queries = 32, .keys = 32, .warps = 2, .columns = 256}},

    {.element_bytes = 4, .head_dim = 64, .tile = {.queries = 128, .keys = 64, .warps = 4, .columns = 64},
     .repairs_in_kernel = true},
    {.element_bytes = 4, .head_dim = 128, .tile = {.queries = 128, .keys = 32, .warps = 4, .columns = 128},
     .unmasked_by_warp = true},
    {.element_bytes = 4, .head_dim = 256, .tile = {.queries = 64, .keys = 16, .warps = 4, .columns = 256}},

    {.element_bytes = 4, .head_dim = 64, .score = ScoreMode::kGeneric,
     .tile = {.queries = 64, .keys = 64, .warps = 4, .columns = 64}},
    {.element_bytes = 4, .head_dim = 128, .score = ScoreMode::kGeneric,
     .tile = {.queries = 64, .keys = 32, .warps = 4, .columns = 128}},
    {.element_bytes = 4, .head_dim = 256, .score = ScoreMode::kGeneric,
     .tile = {.queries = 32, .keys = 16, .warps = 2, .columns = 256}},
};
// clang-format on

// The tile of the whole-heads kernel, whose persistent CTAs have all keys of a head at once: the rows that it holds at
// most, its head dim, and its CTAs per SM.
inline constexpr int kHeadsRows = 128;
inline constexpr int kHeadsHeadDim = 64;
inline constexpr int kWholeHeadCtasPerSm = 2;

}  // namespace flash_attn_ext::sm80
