// Whether writing one tensor changes another.
#pragma once

#include <ATen/core/Tensor.h>

namespace flash_attn_ext::host {

// Whether the views share memory. The answer is exact while their dimensions have equal strides and nest, as those of
// two halves of one buffer do, interleaved or not. Otherwise a view counts as all memory from its first element to its
// last.
bool share_memory(const at::Tensor& a, const at::Tensor& b);

// Whether several indices of a tensor address one element, because a dimension was expanded.
bool repeats_elements(const at::Tensor& tensor);

}  // namespace flash_attn_ext::host
