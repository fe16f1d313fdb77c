#include "host/memory/memory_overlap.h"

#include <c10/util/SmallVector.h>

#include <algorithm>

namespace flash_attn_ext::host {
namespace {

struct Dimension {
  int64_t stride_bytes;
  int64_t size;
};

// The dimensions of a view in which its address changes, in descending order of their strides.
using Dimensions = c10::SmallVector<Dimension, 4>;

Dimensions dimensions_of(const at::Tensor& tensor) {
  const at::IntArrayRef sizes = tensor.sizes(), strides = tensor.strides();
  Dimensions dimensions;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] == 1 || strides[d] == 0) continue;
    dimensions.push_back({strides[d] * static_cast<int64_t>(tensor.element_size()), sizes[d]});
  }
  std::sort(dimensions.begin(), dimensions.end(),
            [](const Dimension& a, const Dimension& b) { return a.stride_bytes > b.stride_bytes; });
  return dimensions;
}

// The inner dimensions of a view, from some dimension on.
struct View {
  const Dimension* begin;
  const Dimension* end;
  int64_t element_bytes;

  View(const Dimensions& dimensions, const at::Tensor& tensor)
      : begin(dimensions.begin()), end(dimensions.end()), element_bytes(static_cast<int64_t>(tensor.element_size())) {}

  bool has_dimensions() const { return begin != end; }
  int64_t bytes() const {  // from its first byte to its last
    int64_t sum = element_bytes;
    for (const Dimension* d = begin; d != end; ++d) sum += (d->size - 1) * d->stride_bytes;
    return sum;
  }
  View inner() const {
    View view = *this;
    ++view.begin;
    return view;
  }
};

// `distance`: bytes from the beginning of a to that of b.
bool overlap(const View& a, const View& b, int64_t distance) {
  if (distance >= a.bytes() || -distance >= b.bytes()) return false;
  if (!a.has_dimensions() || !b.has_dimensions() || a.begin->stride_bytes != b.begin->stride_bytes) return true;
  const int64_t stride = a.begin->stride_bytes;
  const View inner_a = a.inner(), inner_b = b.inner();
  if (inner_a.bytes() > stride || inner_b.bytes() > stride) return true;
  // Inner views that are `steps` indices apart can overlap only if less than a stride is left between them.
  const int64_t nearest = distance / stride;
  for (int64_t steps = nearest - 1; steps <= nearest + 1; ++steps) {
    if (steps >= a.begin->size || -steps >= b.begin->size) continue;
    if (overlap(inner_a, inner_b, distance - steps * stride)) return true;
  }
  return false;
}

// The bytes from a tensor's first element to its last.
int64_t bytes_of(const at::Tensor& tensor) {
  const at::IntArrayRef sizes = tensor.sizes(), strides = tensor.strides();
  int64_t last = 0;
  for (size_t d = 0; d < sizes.size(); ++d) last += (sizes[d] - 1) * strides[d];
  return (last + 1) * static_cast<int64_t>(tensor.element_size());
}

}  // namespace

bool share_memory(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0) return false;
  const int64_t distance = static_cast<const char*>(b.const_data_ptr()) - static_cast<const char*>(a.const_data_ptr());
  if (distance >= bytes_of(a) || -distance >= bytes_of(b)) return false;  // the usual case
  const Dimensions dimensions_a = dimensions_of(a), dimensions_b = dimensions_of(b);
  return overlap(View(dimensions_a, a), View(dimensions_b, b), distance);
}

bool repeats_elements(const at::Tensor& tensor) {
  const at::IntArrayRef sizes = tensor.sizes(), strides = tensor.strides();
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] > 1 && strides[d] == 0) return true;
  }
  return false;
}

}  // namespace flash_attn_ext::host
