// Sums of columns that have an entry of a table in common: the gradient of a table that a bias was looked up in.
#pragma once

#include <cstdint>

#include "attention/score_mod.h"

namespace flash_attn_ext::common {

// to[row][c] = table[row][entries[c]]. An entry that the table lacks is clamped, here and below.
struct TableLookUp {
  const void* table = nullptr;
  int64_t element_bytes = 0;
  int64_t rows = 0;
  int64_t num_entries = 0;
  int64_t row_stride = 0;
  int64_t entry_stride = 0;
  const int32_t* entries = nullptr;
  int64_t columns = 0;
  void* to = nullptr;  // contiguous
};

// sums[row][e] = the sum of values[row][c] over the columns c with entries[c] = e, in an order that only
// shapes and entries decide.
struct TableSums {
  const void* values = nullptr;
  attention::ElementType element = attention::ElementType::kFloat32;  // of values
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t row_stride = 0;  // of values, whose columns are contiguous
  const int32_t* entries = nullptr;
  int64_t num_entries = 0;
  void* partial_sums = nullptr;  // (num_splits(), rows, num_entries) of the accumulate type
  void* sums = nullptr;          // (rows, num_entries)
  attention::ElementType sums_element = attention::ElementType::kFloat32;

  // CTAs share the columns of a row. Each has enough of them.
  int64_t num_splits() const {
    constexpr int64_t kColumnsOfSplit = 512;
    constexpr int64_t kMost = 64;
    const int64_t splits = (columns + kColumnsOfSplit - 1) / kColumnsOfSplit;
    return splits < 1 ? 1 : splits < kMost ? splits : kMost;
  }
};

}  // namespace flash_attn_ext::common
