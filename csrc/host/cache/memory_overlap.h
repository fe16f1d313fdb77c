// Whether writing one tensor changes another.
#pragma once

#include <ATen/core/Tensor.h>

namespace flash_attn_ext::host {

// Whether the views have memory in common. Exact while their dimensions have equal strides and nest, as two halves of
// one buffer do, interleaved or not. Where they do not, views between whose first and last elements others lie count as
// one piece.
bool share_memory(const at::Tensor& a, const at::Tensor& b);

// Whether several indices of a tensor are one element: a dimension was expanded.
bool repeats_elements(const at::Tensor& tensor);

}  // namespace flash_attn_ext::host
