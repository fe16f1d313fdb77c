// Which of a thread's elements of a score tile are visible, as bits.
//
// Comparing an element with both ends of its row takes three instructions. Testing a bit takes little more than one,
// since ptxas moves seven bits into predicates at a time.
#pragma once

#include <cstdint>

#include "attention/division.h"
#include "attention/visibility.h"

namespace flash_attn_ext {

// A thread's rows are 8 apart, and so are its pairs of columns, and visibility shifts by one column per row. So one
// word holds all rows: row r begins 2 r bits below row 0. Tiles with more columns than fit a word have several words.
template <int kThreadRows, int kColumnTiles>
struct VisibleColumns {
  static constexpr int kFirstBit = 2 * kThreadRows;  // of row 0
  static constexpr int kMostTiles = (31 - kFirstBit) / 2;
  static constexpr int kWordTiles = kColumnTiles < kMostTiles ? kColumnTiles : kMostTiles;  // column tiles in a word
  static constexpr int kWords = attention::ceil_div(kColumnTiles, kWordTiles);

  struct Row {
    uint32_t words[kWords];

    FLASH_HOST_DEVICE bool is_visible(int j, int e) const {
      return (words[j / kWordTiles] & (1u << (2 * (j % kWordTiles) + e))) != 0;
    }
  };

  uint32_t band[kWords];
  uint32_t present[kWords];  // columns that exist

  // row, column: of the thread's first element.
  FLASH_HOST_DEVICE VisibleColumns(const attention::Band& seen, int row, int column) {
    for (int w = 0; w < kWords; ++w) {
      const int origin = column + 8 * kWordTiles * w;
      const int offset = row - origin;
      band[w] = columns_from<kFirstBit>(seen.begin + offset) & ~columns_from<kFirstBit>(seen.end + offset);
      present[w] = ~columns_from<0>(seen.length - origin);
    }
  }

  FLASH_HOST_DEVICE Row of_row(int r) const {
    Row row;
    for (int w = 0; w < kWords; ++w) row.words[w] = (band[w] >> (kFirstBit - 2 * r)) & present[w];
    return row;
  }

 private:
  FLASH_HOST_DEVICE static int least(int x, int y) { return x < y ? x : y; }

  // Bit kBit + 2 j + e says whether the column 8 j + e after the word's first one is >= first.
  template <int kBit>
  FLASH_HOST_DEVICE static uint32_t columns_from(int first) {
    constexpr int kEnd = 8 * kWordTiles;
    const int bounded = least(first > -4 * kBit ? first : -4 * kBit, kEnd);
    return ~uint32_t{0} << (kBit + 2 * (bounded >> 3) + least(bounded & 7, 2));
  }
};

}  // namespace flash_attn_ext
