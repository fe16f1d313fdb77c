#pragma once

#include <ATen/core/Tensor.h>

namespace flash_attn_ext::host {

// (rows, num_entries), in the accumulate type of values (rows, columns): for each entry of a table, the sum of the
// columns whose entry it is, in a fixed order. entries: (columns,) int32.
at::Tensor table_sums(const at::Tensor& values, const at::Tensor& entries, int64_t num_entries);

}  // namespace flash_attn_ext::host
