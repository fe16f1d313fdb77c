// The table of the bias-stationary kernels, for bfloat16 and float16: many short sequences, whose heads each have one
// bias for all batch entries, as the windows of Swin have. One tile holds all queries and keys of a sequence.
#pragma once

#include "kernels/config/sm80.h"

namespace flash_attn_ext::sm80 {

struct BiasStationaryConfig {
  int head_dim;
  ScoreMode score = ScoreMode::kBiasMask;
  TileShape tile;            // ctas_per_sm: those of the forward pass
  int ctas_per_sm_backward;  // at least; the shared memory of GPUs before Hopper holds fewer

  bool operator==(const BiasStationaryConfig&) const = default;
};

inline constexpr int kBiasStationaryTokens = 64;  // the most queries, and keys

// A call takes the first row that holds its head dims. CTAs have two stages, so that the loads of the next sequence
// overlap the current one; several CTAs per SM hide each other's epilogues.
// clang-format off
inline constexpr BiasStationaryConfig kBiasStationaryConfigs[] = {
    {.head_dim = 32,
     .tile = {.queries = kBiasStationaryTokens, .keys = kBiasStationaryTokens, .warps = 4, .columns = 32,
              .ctas_per_sm = 5, .stages = 2},
     .ctas_per_sm_backward = 3},
    {.head_dim = 64,
     .tile = {.queries = kBiasStationaryTokens, .keys = kBiasStationaryTokens, .warps = 4, .columns = 64,
              .ctas_per_sm = 3, .stages = 2},
     .ctas_per_sm_backward = 2},
};
// clang-format on

}  // namespace flash_attn_ext::sm80
