// The table of Hopper's key-stationary backward kernels: each row is compiled once for bfloat16 and once for float16.
// The plan names a row. The figures behind the rows are in docs/kernels/log/sm90_backward.md, under "Figures behind
// constants".
#pragma once

#include "kernels/config/sm90.h"
#include "kernels/config/tables.h"

namespace flash_attn_ext::sm90 {

// What head dims decide. A CTA has 64 stationary keys per key warpgroup, and tiles of 64 queries stream through
// pipelines.
struct KeyStationaryTile {
  int q_stages;            // also the stages of dS
  int kv_stages;           // with two, the next work tile's K and V arrive during this one
  bool keys_in_registers;  // K and V are also held in registers as left operands, which saves shared-memory bandwidth
  int dq_columns;          // columns of dQ that registers hold at a time
  // Registers of a thread of the producer, of a key warpgroup and of the dQ warpgroup: 512 together with two key
  // warpgroups.
  int producer_registers;
  int key_registers;
  int dq_registers;

  bool operator==(const KeyStationaryTile&) const = default;
};
// clang-format off
inline constexpr KeyStationaryTile kKeyStationaryTile64 = {
    .q_stages = 3, .kv_stages = 2, .keys_in_registers = true, .dq_columns = 64,
    .producer_registers = 32, .key_registers = 208, .dq_registers = 64};
inline constexpr KeyStationaryTile kKeyStationaryTile96 = {
    .q_stages = 2, .kv_stages = 1, .keys_in_registers = false, .dq_columns = 96,
    .producer_registers = 24, .key_registers = 200, .dq_registers = 88};
inline constexpr KeyStationaryTile kKeyStationaryTile128 = {
    .q_stages = 2, .kv_stages = 1, .keys_in_registers = false, .dq_columns = 64,
    .producer_registers = 24, .key_registers = 208, .dq_registers = 72};
// clang-format on

struct KeyStationaryConfig {
  HeadDims dims;
  KeyStationaryTile tile;
  ScoreMode score = ScoreMode::kScaleOnly;
  // The reducer warp is signalled before a partial dQ is computed, and TMA fetches the accumulated dQ for the last
  // contributor (sm90/backward/key_stationary/dq_epilogue.cuh). The dQ GEMM then overlaps exponentials, and V is waited
  // for late.
  bool pre_signals_dq = false;
  // The GEMMs S and dP add the LSE and delta as augmented columns (tile/sm90/augmented_columns.h). Not where a bias is
  // added to S first or S is capped, nor where dP is dropped before delta is subtracted.
  bool adds_statistics = false;
  // Each launch has a chunk of a head's queries, and partial dK and dV are handed on from one to the next
  // (schedule/query_chunks.h).
  bool chunks_queries = false;
  // A mask, intervals or lists of blocks hide keys beside a bias. Score modes without a bias say so in their names.
  bool hides_keys = false;
  // The gradient of a key bias: dS is summed over the queries of a work tile. The bias is float32, if need be a copy,
  // and queries need not see all keys.
  bool sums_dscores = false;

  bool operator==(const KeyStationaryConfig&) const = default;
};

inline constexpr int64_t kLargestKeyStationaryHeadDim = 128;

// Rows of one score mode stand in the order of their head dims, and a call takes the first head dims that hold its own.
// plan/sm90/backward.cpp chooses among rows of the same head dims.
inline constexpr KeyStationaryConfig kKeyStationaryConfigs[] = {
    {.dims = {64, 64}, .tile = kKeyStationaryTile64},
    {.dims = {64, 64}, .tile = kKeyStationaryTile64, .adds_statistics = true},
    {.dims = {96, 96}, .tile = kKeyStationaryTile96, .adds_statistics = true},
    {.dims = {96, 96}, .tile = kKeyStationaryTile96, .pre_signals_dq = true, .adds_statistics = true},
    {.dims = {128, 128}, .tile = kKeyStationaryTile128, .pre_signals_dq = true},
    {.dims = {128, 128}, .tile = kKeyStationaryTile128, .pre_signals_dq = true, .adds_statistics = true},

    {.dims = {64, 64}, .tile = kKeyStationaryTile64, .adds_statistics = true, .chunks_queries = true},
    {.dims = {96, 96},
     .tile = kKeyStationaryTile96,
     .pre_signals_dq = true,
     .adds_statistics = true,
     .chunks_queries = true},
    {.dims = {128, 128},
     .tile = kKeyStationaryTile128,
     .pre_signals_dq = true,
     .adds_statistics = true,
     .chunks_queries = true},

    {.dims = {64, 64}, .tile = kKeyStationaryTile64, .score = ScoreMode::kMask, .adds_statistics = true},
    {.dims = {96, 96}, .tile = kKeyStationaryTile96, .score = ScoreMode::kMask, .adds_statistics = true},
    {.dims = {128, 128},
     .tile = kKeyStationaryTile128,
     .score = ScoreMode::kMask,
     .pre_signals_dq = true,
     .adds_statistics = true},

    {.dims = {64, 64}, .tile = kKeyStationaryTile64, .score = ScoreMode::kMaskDropout},
    {.dims = {96, 96}, .tile = kKeyStationaryTile96, .score = ScoreMode::kMaskDropout},
    {.dims = {128, 128}, .tile = kKeyStationaryTile128, .score = ScoreMode::kMaskDropout, .pre_signals_dq = true},

    {.dims = {64, 64}, .tile = kKeyStationaryTile64, .score = ScoreMode::kAlibi, .adds_statistics = true},
    {.dims = {96, 96},
     .tile = kKeyStationaryTile96,
     .score = ScoreMode::kAlibi,
     .pre_signals_dq = true,
     .adds_statistics = true},
    {.dims = {128, 128},
     .tile = kKeyStationaryTile128,
     .score = ScoreMode::kAlibi,
     .pre_signals_dq = true,
     .adds_statistics = true},

    {.dims = {64, 64}, .tile = kKeyStationaryTile64, .score = ScoreMode::kAlibiMask, .adds_statistics = true},
    {.dims = {96, 96}, .tile = kKeyStationaryTile96, .score = ScoreMode::kAlibiMask, .adds_statistics = true},
    {.dims = {128, 128},
     .tile = kKeyStationaryTile128,
     .score = ScoreMode::kAlibiMask,
     .pre_signals_dq = true,
     .adds_statistics = true},

    {.dims = {64, 64}, .tile = kKeyStationaryTile64, .score = ScoreMode::kKeyBias, .adds_statistics = true},
    {.dims = {96, 96}, .tile = kKeyStationaryTile96, .score = ScoreMode::kKeyBias, .adds_statistics = true},
    {.dims = {128, 128},
     .tile = kKeyStationaryTile128,
     .score = ScoreMode::kKeyBias,
     .pre_signals_dq = true,
     .adds_statistics = true},
    {.dims = {64, 64},
     .tile = kKeyStationaryTile64,
     .score = ScoreMode::kKeyBias,
     .adds_statistics = true,
     .sums_dscores = true},
    {.dims = {96, 96},
     .tile = kKeyStationaryTile96,
     .score = ScoreMode::kKeyBias,
     .adds_statistics = true,
     .sums_dscores = true},
    {.dims = {128, 128},
     .tile = kKeyStationaryTile128,
     .score = ScoreMode::kKeyBias,
     .pre_signals_dq = true,
     .adds_statistics = true,
     .sums_dscores = true},
    {.dims = {64, 64}, .tile = kKeyStationaryTile64, .score = ScoreMode::kKeyBiasDropout},
    {.dims = {96, 96}, .tile = kKeyStationaryTile96, .score = ScoreMode::kKeyBiasDropout},
    {.dims = {128, 128}, .tile = kKeyStationaryTile128, .score = ScoreMode::kKeyBiasDropout},

    // A softcap, alone or beside a mask. With anything else that changes scores, the two-pass kernels run.
    {.dims = {64, 64}, .tile = kKeyStationaryTile64, .score = ScoreMode::kSoftcap},
    {.dims = {96, 96}, .tile = kKeyStationaryTile96, .score = ScoreMode::kSoftcap, .pre_signals_dq = true},
    {.dims = {128, 128}, .tile = kKeyStationaryTile128, .score = ScoreMode::kSoftcap, .pre_signals_dq = true},
    {.dims = {64, 64}, .tile = kKeyStationaryTile64, .score = ScoreMode::kSoftcapMask},
    {.dims = {96, 96}, .tile = kKeyStationaryTile96, .score = ScoreMode::kSoftcapMask, .pre_signals_dq = true},
    {.dims = {128, 128}, .tile = kKeyStationaryTile128, .score = ScoreMode::kSoftcapMask, .pre_signals_dq = true},

    // A bias, alone or beside a mask. With a gradient that dbias_over_batch.cuh does not compute, the two-pass kernels
    // run.
    {.dims = {64, 64}, .tile = kKeyStationaryTile64, .score = ScoreMode::kBiasMask},
    {.dims = {96, 96}, .tile = kKeyStationaryTile96, .score = ScoreMode::kBiasMask},
    {.dims = {128, 128}, .tile = kKeyStationaryTile128, .score = ScoreMode::kBiasMask},
    {.dims = {64, 64}, .tile = kKeyStationaryTile64, .score = ScoreMode::kBiasMask, .hides_keys = true},
    {.dims = {96, 96}, .tile = kKeyStationaryTile96, .score = ScoreMode::kBiasMask, .hides_keys = true},
    {.dims = {128, 128},
     .tile = kKeyStationaryTile128,
     .score = ScoreMode::kBiasMask,
     .pre_signals_dq = true,
     .hides_keys = true},
    // At larger head dims shared memory has no room for the draws beside the bias.
    {.dims = {64, 64}, .tile = kKeyStationaryTile64, .score = ScoreMode::kBiasMaskDropout},
    {.dims = {64, 64}, .tile = kKeyStationaryTile64, .score = ScoreMode::kBiasMaskDropout, .hides_keys = true},

    {.dims = {64, 64}, .tile = kKeyStationaryTile64, .score = ScoreMode::kDropout},
    {.dims = {96, 96}, .tile = kKeyStationaryTile96, .score = ScoreMode::kDropout},
    {.dims = {128, 128}, .tile = kKeyStationaryTile128, .score = ScoreMode::kDropout},
};

// The head dims of the kernels that a call takes.
constexpr HeadDims key_stationary_head_dims(int64_t head_dim_qk, int64_t head_dim_v) {
  for (const KeyStationaryConfig& config : kKeyStationaryConfigs) {
    if (config.dims.fit(head_dim_qk, head_dim_v)) return config.dims;
  }
  return {};
}

}  // namespace flash_attn_ext::sm90
