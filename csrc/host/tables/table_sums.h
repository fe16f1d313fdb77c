// Entries of a table (rows, entries), and sums of columns by their entries. entries: (columns,) int32, contiguous. On a
// GPU an entry that the table lacks is clamped; the CPU's callers have checked them.
#pragma once

#include <ATen/core/Tensor.h>

namespace flash_attn_ext::host {

// (rows, columns): of each column the entry that it has.
at::Tensor look_up(const at::Tensor& table, const at::Tensor& entries);

// (rows, num_entries) of `dtype`: for each entry of a table, the sum of the columns of values (rows, columns) whose
// entry it is, in a fixed order and in the accumulate type.
at::Tensor table_sums(const at::Tensor& values, const at::Tensor& entries, int64_t num_entries, at::ScalarType dtype);

// The accumulate type of values.
at::ScalarType accumulate_type(const at::Tensor& values);

// look_up, recorded by autograd in grad mode. For tensors that hold memory, outside of functorch and forward mode.
at::Tensor recorded_look_up(const at::Tensor& table, const at::Tensor& entries);

}  // namespace flash_attn_ext::host
