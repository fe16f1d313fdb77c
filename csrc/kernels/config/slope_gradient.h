// The table of Hopper's kernels that compute the gradient of ALiBi slopes: queries stay, and key tiles stream past.
#pragma once

#include "kernels/config/sm90.h"

namespace flash_attn_ext::sm90 {

inline constexpr int kSlopeGradientQueries = 128;  // of a work tile

struct SlopeGradientConfig {
  int head_dim;                 // of Q and K, and of V
  int block_n;                  // keys of a tile
  int stages;                   // of tiles of K and V, which alternate: as many as shared memory holds, and at most 6
  int producer_registers = 24;  // of a thread
  int consumer_registers = 240;

  bool operator==(const SlopeGradientConfig&) const = default;
};
// A call takes the first row that holds its head dims.
inline constexpr SlopeGradientConfig kSlopeGradientConfigs[] = {{.head_dim = 64, .block_n = 128, .stages = 6},
                                                                {.head_dim = 128, .block_n = 128, .stages = 5},
                                                                {.head_dim = 256, .block_n = 64, .stages = 3}};

}  // namespace flash_attn_ext::sm90
