// Memory of a call: results, some laid out like an input, and workspace.
#pragma once

#include <ATen/core/DimVector.h>
#include <ATen/core/Tensor.h>

namespace flash_attn_ext::host {

// An uninitialised, contiguous tensor on `device`, which is the current one. Unless PyTorch is asked to fill such
// memory, it is made without at::empty, which goes through the dispatcher and two device guards and thereby takes
// longer than the allocation.
at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype, at::Device device);

// An uninitialised tensor of these sizes whose dimensions lie in memory in the order of `like`'s strides (largest
// first), without gaps. Dimensions of equal stride, and all of a broadcast (stride 0) `like`, lie in dimension order;
// with sequence_first that is (batch, sequence, heads, head dim) for a `like` of (batch, heads, sequence, head dim).
at::Tensor empty_in_stride_order(const at::Tensor& like, at::IntArrayRef sizes, bool sequence_first = false);

// The strides of that tensor.
at::DimVector strides_in_order_of(const at::Tensor& like, at::IntArrayRef sizes, bool sequence_first = false);

// Uninitialised memory on `device`, which is the current one; undefined for 0 bytes.
at::Tensor byte_memory(int64_t bytes, at::Device device);

}  // namespace flash_attn_ext::host
