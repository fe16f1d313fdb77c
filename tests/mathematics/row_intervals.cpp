// The bits of RowIntervals against brute force, in their own order and in that of MaskBits, for any begins and ends.
#include "attention/row_intervals.h"

#include <climits>
#include <cstdio>
#include <random>

#include "attention/score_mod.h"

namespace {

using flash_attn_ext::attention::MaskBits;
using flash_attn_ext::attention::MaskTiles;
using flash_attn_ext::attention::RowIntervals;
using flash_attn_ext::attention::Sequence;

bool expects(const RowIntervals& intervals, const int32_t* row, int64_t key) {
  bool seen = false;
  for (int m = 0; m < intervals.count; ++m) seen |= int64_t{row[2 * m]} <= key && key < int64_t{row[2 * m + 1]};
  return seen;
}

bool agrees(const RowIntervals& intervals, const int32_t* row, int first) {
  const uint32_t word = intervals.word(row, first);
  for (int i = 0; i < 32; ++i) {
    if ((word >> i & 1) == expects(intervals, row, int64_t{first} + i) &&
        intervals.sees(row, int64_t{first} + i) == expects(intervals, row, int64_t{first} + i)) {
      continue;
    }
    std::printf("key %d of the word from %d on\n", first + i, first);
    return false;
  }
  for (int thread = 0; thread < 4; ++thread) {
    const uint32_t of_quad = intervals.quad_word(row, first, thread);
    for (int bit = 0; bit < 32; ++bit) {
      const int key = first + bit / 2 * 8 + 2 * thread + bit % 2;
      if ((of_quad >> bit & 1) == expects(intervals, row, key)) continue;
      std::printf("key %d of the group from %d on, thread %d\n", key, first, thread);
      return false;
    }
  }
  return true;
}

// Fewer tiles than there are may count as hidden, but not more, and not less than half of them.
bool counts_hidden_tiles() {
  uint32_t last = 0;
  for (uint32_t tiles = 0; tiles < 3000; ++tiles) {
    const uint32_t code = MaskTiles::encode_hidden_before(tiles);
    const uint32_t decoded = MaskTiles::decode_hidden_before(code);
    if (code >= MaskTiles::kAllBefore || code < last || decoded > tiles) return false;
    if (tiles < 1000 && 2 * decoded < tiles) return false;
    last = code;
  }
  return true;
}

}  // namespace

int main() {
  static_assert(MaskBits::kKeys == 128);
  if (!counts_hidden_tiles()) return 1;
  std::mt19937 random(7);
  std::uniform_int_distribution<int> near(-40, 400);
  std::uniform_int_distribution<int> any(INT_MIN, INT_MAX);
  std::uniform_int_distribution<int> kind(0, 9);
  constexpr int kLongest = 1 << 29;
  for (int i = 0; i < 20000; ++i) {
    int32_t bounds[2 * RowIntervals::kMost];
    const int first = i % 50 == 0 ? kLongest - 128 : i % 20 * 16;
    for (int32_t& bound : bounds) {
      const int of = kind(random);
      bound = of == 0 ? INT_MIN : of == 1 ? INT_MAX : of == 2 ? any(random) : first - 150 + near(random);
    }
    const RowIntervals intervals = {.data = bounds, .count = 1 + i % RowIntervals::kMost};
    if (!agrees(intervals, intervals.row(Sequence{}, 0, 0), first)) return 1;
  }
  return 0;
}
