#include "host/memory/allocate.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "host/memory/memory_overlap.h"

namespace flash_attn_ext::host {
namespace {

at::Allocator* allocator_of(at::Device device) {
  if (device.is_cuda()) return at::detail::getCUDAHooks().getCUDADeviceAllocator();
  TORCH_INTERNAL_ASSERT(device.is_cpu(), "no backend for ", device);
  return c10::GetCPUAllocator();
}

c10::DispatchKeySet keys_of(at::Device device) {
  return c10::DispatchKeySet(device.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA);
}

// Whether new memory has to be filled, as torch.use_deterministic_algorithms may ask. PyTorch's own functions do so
// then.
bool fills_uninitialised() {
  const at::Context& context = at::globalContext();
  return context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory();
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype, at::Device device) {
  if (fills_uninitialised()) return at::empty_strided(sizes, strides, at::TensorOptions(dtype).device(device));
  return at::Tensor(at::detail::empty_strided_generic(sizes, strides, allocator_of(device), keys_of(device), dtype));
}

}  // namespace

at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype, at::Device device) {
  if (fills_uninitialised()) return at::empty(sizes, at::TensorOptions(dtype).device(device));
  return at::Tensor(at::detail::empty_generic(sizes, allocator_of(device), keys_of(device), dtype, std::nullopt));
}

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
  if (!sequence_first && like.is_contiguous()) return empty(sizes, like.scalar_type(), like.device());
  return empty_strided(sizes, strides_in_order_of(like, sizes, sequence_first), like.scalar_type(), like.device());
}

at::Tensor byte_memory(int64_t bytes, at::Device device) {
  return bytes == 0 ? at::Tensor() : empty({bytes}, at::kByte, device);
}

}  // namespace flash_attn_ext::host
