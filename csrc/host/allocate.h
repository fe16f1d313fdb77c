// Outputs laid out in memory like an input.
#pragma once

#include <ATen/core/Tensor.h>

namespace flash_attn_ext::host {

// An uninitialised tensor of these sizes whose dimensions lie in memory in the order of `like`'s strides (largest
// first, equal ones in dimension order), without gaps. A broadcast (stride 0) `like` gives a contiguous tensor.
at::Tensor empty_in_stride_order(const at::Tensor& like, at::IntArrayRef sizes);

// Uninitialised memory; undefined for 0 bytes.
at::Tensor byte_memory(int64_t bytes, const at::TensorOptions& options);

}  // namespace flash_attn_ext::host
