// Which tiles stream past a block's rows: of keys past its queries, or of queries past its keys.
#pragma once

#include <cstdint>

#include "attention/host_device.h"
#include "attention/visibility.h"

namespace flash_attn_ext {

// Tiles [begin, end); of these, [full_begin, full_end) are seen whole by each row.
struct TileRange {
  int begin;
  int end;
  int full_begin;
  int full_end;

  FLASH_HOST_DEVICE bool empty() const { return end <= begin; }
  FLASH_HOST_DEVICE bool full(int tile) const { return tile >= full_begin && tile < full_end; }

  // One of `count` parts, of as many tiles each, within one.
  FLASH_HOST_DEVICE TileRange part(int index, int count) const {
    if (empty()) return *this;
    const int share = (end - begin) / count;
    const int one_more = end - begin - share * count;  // the first ones
    const int first = begin + index * share + (index < one_more ? index : one_more);
    return {first, first + share + (index < one_more ? 1 : 0), full_begin, full_end};
  }
};

// From what the block's first and last row see. Neither end of that ever decreases from row to row, so between them
// these two see what any row sees; the last one begins last, and the first one ends first.
//
// Position is the type that positions are divided in. It changes which registers ptxas has left: dK/dV at head dim 128
// spills 20 bytes in its loop with 64 bits and none with uint32_t, the forward kernel the other way round.
template <int kTile, class Position = int64_t>
FLASH_HOST_DEVICE TileRange tile_range(const attention::Interval& first, const attention::Interval& last) {
  const auto tile_of = [](int64_t position) { return static_cast<int>(static_cast<Position>(position) / kTile); };
  const int begin = tile_of(first.begin);
  return {.begin = begin,
          .end = first.begin < last.end ? tile_of(last.end + kTile - 1) : begin,
          .full_begin = tile_of(last.begin + kTile - 1),
          .full_end = tile_of(first.end)};
}

}  // namespace flash_attn_ext
