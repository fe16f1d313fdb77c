// Outputs laid out in memory like an input.
#pragma once

#include <ATen/core/DimVector.h>
#include <ATen/core/Tensor.h>

namespace flash_attn_ext::host {

// An uninitialised tensor of these sizes whose dimensions lie in memory in the order of `like`'s strides (largest
// first), without gaps. Dimensions of equal stride, and all of a broadcast (stride 0) `like`, lie in dimension order;
// with sequence_first that is (batch, sequence, heads, head dim) for a `like` of (batch, heads, sequence, head dim).
at::Tensor empty_in_stride_order(const at::Tensor& like, at::IntArrayRef sizes, bool sequence_first = false);

// Its strides.
at::DimVector strides_in_order_of(const at::Tensor& like, at::IntArrayRef sizes, bool sequence_first = false);

// Uninitialised memory; undefined for 0 bytes.
at::Tensor byte_memory(int64_t bytes, const at::TensorOptions& options);

}  // namespace flash_attn_ext::host
