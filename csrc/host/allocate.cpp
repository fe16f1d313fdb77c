#include "host/allocate.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace flash_attn_ext::host {

at::Tensor empty_in_stride_order(const at::Tensor& like, at::IntArrayRef sizes) {
  bool broadcast = false;
  for (int64_t d = 0; d < like.dim(); ++d) broadcast = broadcast || (like.size(d) > 1 && like.stride(d) == 0);
  if (like.is_contiguous() || broadcast) return at::empty(sizes, like.options());
  std::vector<int64_t> order(like.dim());
  std::iota(order.begin(), order.end(), int64_t{0});
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return like.stride(a) > like.stride(b); });
  std::vector<int64_t> strides(like.dim());
  int64_t stride = 1;
  for (auto d = order.rbegin(); d != order.rend(); ++d) {
    strides[*d] = stride;
    stride *= std::max<int64_t>(sizes[*d], 1);
  }
  return at::empty_strided(sizes, strides, like.options());
}

at::Tensor copy_with_aligned_rows(const at::Tensor& tensor) {
  const int64_t alignment = 16 / tensor.element_size();
  std::vector<int64_t> sizes = tensor.sizes().vec();
  sizes.back() = (sizes.back() + alignment - 1) / alignment * alignment;
  at::Tensor rows = at::empty(sizes, tensor.options()).narrow(-1, 0, tensor.size(-1));
  return rows.copy_(tensor);
}

}  // namespace flash_attn_ext::host
