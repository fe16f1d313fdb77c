// How a head's rows are divided into stationary and streamed tiles.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/division.h"
#include "attention/visibility.h"
#include "kernels/config/cpu.h"

namespace flash_attn_ext::cpu {

// The slice of one streamed tile that a work tile computes: rows [first, first + width), which are columns of the score
// tile. The width is a multiple of the clip and may pass the sequence's end, where packed operands are zero-padded.
// Rows [first, first + count) exist.
struct StreamedSlice {
  int64_t tile;
  int64_t first;  // position inside the sequence
  int64_t count;
  int64_t width;

  int64_t offset_in_tile() const { return first - tile * kStreamedRows; }
};

// Calls function(slice) for each streamed tile that overlaps the interval, in ascending order. Slices are clipped to
// the interval in steps of `clip` rows.
template <class Function>
void for_each_slice(const attention::Interval& visible, int64_t length, int64_t clip, Function&& function) {
  if (visible.empty()) return;
  for (int64_t tile = visible.begin / kStreamedRows; tile * kStreamedRows < visible.end; ++tile) {
    const int64_t begin = std::max(visible.begin, tile * kStreamedRows) / clip * clip;
    const int64_t end = std::min(visible.end, (tile + 1) * kStreamedRows);
    const int64_t width = attention::ceil_div(end - begin, clip) * clip;
    function(StreamedSlice{tile, begin, std::min(width, length - begin), width});
  }
}

// A row's visible interval, relative to the slice and clipped to it.
inline attention::Interval within(const attention::Interval& visible, const StreamedSlice& slice) {
  const int64_t begin = std::clamp<int64_t>(visible.begin - slice.first, 0, slice.count);
  return {begin, std::clamp(visible.end - slice.first, begin, slice.count)};
}

}  // namespace flash_attn_ext::cpu
