#include "host/aten/layouts.h"

#include <ATen/ops/empty_like.h>

namespace flash_attn_ext::host {
namespace {

// The stride of a dimension with one element has no effect on the layout.
bool have_equal_layouts(const at::Tensor& a, const at::Tensor& b) {
  for (int64_t dim = 0; dim < a.dim(); ++dim) {
    if (a.size(dim) != 1 && a.stride(dim) != b.stride(dim)) return false;
  }
  return true;
}

}  // namespace

at::Tensor as_like(const at::Tensor& tensor, const at::Tensor& model) {
  if (tensor.strides() == model.strides()) return tensor;
  at::Tensor like = at::empty_like(model);
  return have_equal_layouts(like, tensor) ? tensor : like.copy_(tensor);
}

at::Tensor sequence_first(const at::Tensor& tensor) {
  const int64_t row = tensor.dim() == 4 ? tensor.size(3) : 1;
  const int64_t heads = tensor.size(1), length = tensor.size(2);
  if ((heads == 1 || tensor.stride(1) == row) && (length == 1 || tensor.stride(2) == row * heads) &&
      (tensor.size(0) == 1 || tensor.stride(0) == row * heads * length)) {
    return tensor;
  }
  return tensor.transpose(1, 2).contiguous().transpose(1, 2);
}

}  // namespace flash_attn_ext::host
