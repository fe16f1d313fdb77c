// The threads of a warp, as csrc/tile/accumulator.h numbers them.
#pragma once

namespace flash_attn_ext::tile {

inline constexpr int kWarpSize = 32;
inline int lane() { return static_cast<int>(threadIdx.x) % kWarpSize; }

}  // namespace flash_attn_ext::tile
