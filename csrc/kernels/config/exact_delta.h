// The table of Hopper's kernels that compute the exact delta, or from it the gradient of ALiBi slopes: queries stay,
// and key tiles stream past.
#pragma once

#include "kernels/config/sm90.h"

namespace flash_attn_ext::sm90 {

inline constexpr int kExactDeltaQueries = 128;  // of a work tile

struct ExactDeltaConfig {
  int head_dim;                 // of Q and K, and of V
  int block_n;                  // keys of a tile
  int stages;                   // of tiles of K and V, which alternate: as many as shared memory holds, and at most 6
  int producer_registers = 24;  // of a thread
  int consumer_registers = 240;
  bool adds_key_bias = false;  // a float32 one, and delta is the result; else slopes, and their gradient is

  bool operator==(const ExactDeltaConfig&) const = default;
};
// A call takes the first row of its kind that holds its head dims.
inline constexpr ExactDeltaConfig kExactDeltaConfigs[] = {
    {.head_dim = 64, .block_n = 128, .stages = 6},
    {.head_dim = 128, .block_n = 128, .stages = 5},
    {.head_dim = 256, .block_n = 64, .stages = 3},
    {.head_dim = 64, .block_n = 128, .stages = 6, .adds_key_bias = true},
    {.head_dim = 128, .block_n = 128, .stages = 5, .adds_key_bias = true}};

}  // namespace flash_attn_ext::sm90
