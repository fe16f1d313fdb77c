#include "host/allocate.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "host/cache/memory_overlap.h"

namespace flash_attn_ext::host {

at::DimVector strides_in_order_of(const at::Tensor& like, at::IntArrayRef sizes, bool sequence_first) {
  at::DimVector order(like.dim());
  std::iota(order.begin(), order.end(), int64_t{0});
  if (sequence_first) std::swap(order[1], order[2]);
  if (!repeats_elements(like)) {
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return like.stride(a) > like.stride(b); });
  }
  at::DimVector strides(like.dim());
  int64_t stride = 1;
  for (auto d = order.rbegin(); d != order.rend(); ++d) {
    strides[*d] = stride;
    stride *= std::max<int64_t>(sizes[*d], 1);
  }
  return strides;
}

at::Tensor empty_in_stride_order(const at::Tensor& like, at::IntArrayRef sizes, bool sequence_first) {
  if (!sequence_first && like.is_contiguous()) return at::empty(sizes, like.options());
  return at::empty_strided(sizes, strides_in_order_of(like, sizes, sequence_first), like.options());
}

at::Tensor byte_memory(int64_t bytes, const at::TensorOptions& options) {
  return bytes == 0 ? at::Tensor() : at::empty({bytes}, options.dtype(at::kByte));
}

}  // namespace flash_attn_ext::host
