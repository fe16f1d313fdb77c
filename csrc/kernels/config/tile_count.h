// How many tiles cover a length.
#pragma once

#include <cstdint>

namespace flash_attn_ext {

constexpr int64_t num_tiles(int64_t rows, int64_t tile_rows) { return (rows + tile_rows - 1) / tile_rows; }

// CTAs that share a tile of rows. There is one even if there is no column, because it also writes the LSE.
constexpr int64_t num_slices(int64_t head_dim, int64_t columns) {
  return head_dim <= columns ? 1 : num_tiles(head_dim, columns);
}

}  // namespace flash_attn_ext
