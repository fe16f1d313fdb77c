#pragma once

#include <ATen/core/Tensor.h>

namespace flash_attn_ext::host {

// (..., query blocks, width) bool on a GPU: which blocks of keys the lists have. counts: (..., query blocks) and
// indices: (..., query blocks, blocks of a list), both int32 or both int64. Blocks that do not exist are left out.
at::Tensor block_mask_of_lists(const at::Tensor& counts, const at::Tensor& indices, int64_t width);

}  // namespace flash_attn_ext::host
