// Which tiles of P and dS have something visible in them: as the kernel that writes them sees it, and those that read
// them.
#pragma once

#include "kernels/plan/score_tiles.h"
#include "kernels/schedule/tile_range.cuh"

namespace flash_attn_ext::sm90 {

// Of the tiles of a sequence.
struct SeenTiles {
  static constexpr int kRows = ScoreTiles::kRows;

  const attention::Visibility& visibility;
  const attention::Sequence& sequence;

  // The tiles of keys that a tile of queries sees something of.
  FLASH_HOST_DEVICE TileRange keys_of(int query_tile) const {
    const int first = query_tile * kRows;
    const int end = least(first + kRows, sequence.num_queries);
    if (first >= end) return {0, 0, 0, 0};
    return tile_range<kRows, uint32_t>(visibility.keys_of<int>(first, sequence),
                                       visibility.keys_of<int>(end - 1, sequence));
  }

  // The tiles of queries that see something of a tile of keys: those whose keys_of has it.
  FLASH_HOST_DEVICE TileRange queries_of(int key_tile) const {
    const int first = key_tile * kRows;
    const int end = least(first + kRows, sequence.num_keys);
    if (first >= end) return {0, 0, 0, 0};
    return tile_range<kRows, uint32_t>(visibility.queries_of<int>(first, sequence),
                                       visibility.queries_of<int>(end - 1, sequence));
  }

 private:
  FLASH_HOST_DEVICE static int least(int x, int64_t y) { return x < y ? x : static_cast<int>(y); }
};

// The tiles that any of two ranges has, and what lies between.
FLASH_HOST_DEVICE TileRange joined(const TileRange& a, const TileRange& b) {
  if (a.empty()) return b;
  if (b.empty()) return a;
  return {a.begin < b.begin ? a.begin : b.begin, a.end > b.end ? a.end : b.end, 0, 0};
}

}  // namespace flash_attn_ext::sm90
