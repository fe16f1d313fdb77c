// The kernels of both passes for sequences of up to 256 tokens with a bias for each query and key, such as the rows of
// an Evoformer.
#pragma once

#include "kernels/config/sm80.h"
#include "kernels/config/sm90.h"

namespace flash_attn_ext::sm80 {

inline constexpr int kShortBiasTokens = 256;  // the most queries, and keys
inline constexpr int kShortBiasHeadDim = 32;

// The forward kernel: a warp has 32 queries, and 32 keys at a time. Three stages of its bias are in flight.
struct ShortBiasConfig {
  int head_dim;
  ScoreMode score;
  TileShape tile;

  bool operator==(const ShortBiasConfig&) const = default;
};
inline constexpr ShortBiasConfig kShortBiasForward = {.head_dim = kShortBiasHeadDim,
                                                      .score = ScoreMode::kBiasMask,
                                                      .tile = {.queries = kShortBiasTokens,
                                                               .keys = 32,
                                                               .warps = 8,
                                                               .columns = kShortBiasHeadDim,
                                                               .ctas_per_sm = 2,
                                                               .stages = 3}};

// One CTA computes a head. The plan chooses these kernels on Hopper, where two CTAs share an SM.
inline constexpr int kShortBiasCtas = 2;
inline constexpr int kShortBiasSharedBytes = sm90::shared_bytes(kShortBiasCtas);

}  // namespace flash_attn_ext::sm80
