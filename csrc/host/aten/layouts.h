// Results with the strides that the meta kernels of PyTorch's operators declare.
#pragma once

#include <ATen/core/Tensor.h>

namespace flash_attn_ext::host {

// The values of `tensor`, with the strides of empty_like(model). Shapes are equal.
at::Tensor as_like(const at::Tensor& tensor, const at::Tensor& model);

// The values of (B, H, L, D) or (B, H, L), lying in memory as (B, L, H, D) or (B, L, H). `tensor` has no gaps.
at::Tensor sequence_first(const at::Tensor& tensor);

}  // namespace flash_attn_ext::host
