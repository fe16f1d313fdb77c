// A warpgroup and its accumulators, as csrc/tile/sm90/gemm.h defines them.
#pragma once

#include "tile/accumulator.h"

namespace flash_attn_ext::tile {

inline constexpr int kWarpgroupSize = 128;

template <int kColumns>
struct WarpgroupAccumulator {
  static constexpr int kColumnTiles = kColumns / 8;
  float c[1][kColumnTiles][4];
};

}  // namespace flash_attn_ext::tile
