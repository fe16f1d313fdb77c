// Sums of columns that have an entry of a table in common: the gradient of a table that a bias was looked up in.
#pragma once

#include <cstdint>

#include "attention/score_mod.h"

namespace flash_attn_ext::common {

// sums[row][e] = the sum of values[row][c] over the columns c with entries[c] = e, in an order that the shapes alone
// decide. Columns whose entry the table does not have are left out.
struct TableSums {
  const void* values = nullptr;
  attention::ElementType element = attention::ElementType::kFloat32;  // of values
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t row_stride = 0;  // of values, whose columns are contiguous
  const int32_t* entries = nullptr;
  int64_t num_entries = 0;
  void* parts = nullptr;  // (num_parts(), rows, num_entries) of the accumulate type
  void* sums = nullptr;   // (rows, num_entries) of the accumulate type

  // CTAs share the columns of a row. Each has enough of them.
  int64_t num_parts() const {
    constexpr int64_t kColumnsOfPart = 2048;
    constexpr int64_t kMost = 64;
    const int64_t parts = (columns + kColumnsOfPart - 1) / kColumnsOfPart;
    return parts < 1 ? 1 : parts < kMost ? parts : kMost;
  }
};

}  // namespace flash_attn_ext::common
