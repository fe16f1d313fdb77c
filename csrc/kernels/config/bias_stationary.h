// The table of the bias-stationary kernels, for bfloat16 and float16: many short sequences. A head may have one bias
// for all batch entries, as the windows of Swin have. One tile holds all queries and keys of a sequence.
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

// A call takes the first row that holds its head dims. With two stages, the loads of the next sequence overlap the
// current one. Where the backward pass has no room for them, there is one, and the CTAs of an SM overlap each other.
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
    {.head_dim = 96,
     .tile = {.queries = kBiasStationaryTokens, .keys = kBiasStationaryTokens, .warps = 4, .columns = 96,
              .ctas_per_sm = 4, .stages = 1},
     .ctas_per_sm_backward = 3},
    {.head_dim = 128,
     .tile = {.queries = kBiasStationaryTokens, .keys = kBiasStationaryTokens, .warps = 4, .columns = 128,
              .ctas_per_sm = 3, .stages = 1},
     .ctas_per_sm_backward = 2},
    {.head_dim = 160,
     .tile = {.queries = kBiasStationaryTokens, .keys = kBiasStationaryTokens, .warps = 4, .columns = 160,
              .ctas_per_sm = 3, .stages = 1},
     .ctas_per_sm_backward = 2},
};
// clang-format on

}  // namespace flash_attn_ext::sm80
