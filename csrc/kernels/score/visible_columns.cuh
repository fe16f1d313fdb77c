// Which of a thread's elements of a score tile are visible, as bits.
//
// Comparing an element with both ends of its row takes three instructions. Testing a bit takes little more than one:
// ptxas moves seven bits into predicates at a time.
#pragma once

#include <cstdint>

#include "attention/visibility.h"
#include "ptx/pin.h"

namespace flash_attn_ext {

// A thread's rows are 8 apart, as its pairs of columns are, and the band moves along with the rows. So one word holds
// all of them: row r begins 2 r bits below row 0.
template <class Acc>
struct VisibleColumns {
  static constexpr int kFirstBit = 2 * Acc::kThreadRows;  // of row 0
  static_assert(kFirstBit + 2 * Acc::kColumnTiles <= 32);

  uint32_t band;
  uint32_t present;  // columns that exist

  __device__ __forceinline__ explicit VisibleColumns(const attention::Band& seen) {
    const int origin = Acc::column(0, 0);
    const int row = Acc::row(0) - origin;
    band = columns_from<kFirstBit>(seen.begin + row) & ~columns_from<kFirstBit>(seen.end + row);
    present = ~columns_from<0>(seen.length - origin);
  }

  // For is_visible.
  __device__ __forceinline__ uint32_t of_row(int r) const { return ptx::pin((band >> (kFirstBit - 2 * r)) & present); }
  __device__ __forceinline__ static bool is_visible(uint32_t row, int j, int e) {
    return (row & (1u << (2 * j + e))) != 0;
  }

 private:
  // Bit kBit + 2 j + e says whether column_step(j, e) >= first.
  template <int kBit>
  __device__ __forceinline__ static uint32_t columns_from(int first) {
    const int bounded = min(max(first, -4 * kBit), 8 * Acc::kColumnTiles);
    return ~uint32_t{0} << (kBit + 2 * (bounded >> 3) + min(bounded & 7, 2));
  }
};

}  // namespace flash_attn_ext
