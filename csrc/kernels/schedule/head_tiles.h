// The head that a CTA works on, and the tiles that stream past its rows, which are key tiles past its queries or query
// tiles past its keys.
#pragma once

#include <cstdint>

#include "attention/host_device.h"
#include "attention/sequence.h"
#include "attention/visibility.h"

namespace flash_attn_ext {

// A query head of a sequence, and its key head.
struct HeadCoord {
  attention::Sequence sequence;
  int64_t head;
  int64_t key_head;
};

// Tiles [begin, end). Of these, each row sees all of [full_begin, full_end).
struct TileRange {
  int begin;
  int end;
  int full_begin;
  int full_end;

  FLASH_HOST_DEVICE bool empty() const { return end <= begin; }
  FLASH_HOST_DEVICE bool full(int tile) const { return tile >= full_begin && tile < full_end; }

  // One of `count` splits, all of which have the same number of tiles, within one.
  FLASH_HOST_DEVICE TileRange split(int index, int count) const {
    if (empty()) return *this;
    const int share = (end - begin) / count;
    const int one_more = end - begin - share * count;  // so many splits, the first ones, have one tile more
    const int first = begin + index * share + (index < one_more ? index : one_more);
    return {first, first + share + (index < one_more ? 1 : 0), full_begin, full_end};
  }
};

// The tiles follow from what the CTA's first and last row see. Neither end of what a row sees ever decreases from row
// to row, so between them these two see what any row sees. The last row begins last, and the first one ends first.
//
// Position is the type in which positions are divided. It changes which registers ptxas has left. With 64 bits dK/dV at
// head dim 128 spills in its loop, and with uint32_t the forward kernel does (docs/kernels/log/sm80.md, "Types of
// positions").
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
