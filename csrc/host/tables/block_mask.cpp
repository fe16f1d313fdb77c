#include "host/tables/block_mask.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include "host/checks/tensor_checks.h"
#include "host/library/library.h"

namespace flash_attn_ext::host {

at::Tensor block_mask_of_lists(const at::Tensor& counts, const at::Tensor& indices, int64_t width) {
  check_holds_memory("counts", counts);
  check_holds_memory("indices", indices);
  const at::ScalarType dtype = counts.scalar_type();
  TORCH_CHECK((dtype == at::kInt || dtype == at::kLong) && indices.scalar_type() == dtype,
              "counts and indices have dtypes ", dtype_name(dtype), " and ", dtype_name(indices.scalar_type()),
              ", expected int32 or int64 for both");
  TORCH_CHECK(indices.dim() == counts.dim() + 1 && indices.sizes().slice(0, counts.dim()) == counts.sizes(),
              "counts and indices have shapes ", counts.sizes(), " and ", indices.sizes(),
              ", expected (..., query blocks) and (..., query blocks, blocks of a list)");
  TORCH_CHECK(counts.is_cuda() && indices.device() == counts.device(), "counts is on ", counts.device(),
              " and indices on ", indices.device(), ", expected one GPU; move them to it");
  TORCH_CHECK(width >= 0, "width is ", width, ", expected 0 or more");
  const c10::DeviceGuard guard(counts.device());
  at::DimVector sizes(counts.sizes());
  sizes.push_back(width);
  const at::Tensor mask = at::empty(sizes, counts.options().dtype(at::kBool));
  const at::Tensor all_counts = counts.contiguous();
  const at::Tensor all_indices = indices.contiguous();
  const common::BlockMaskOfLists params = {.counts = all_counts.const_data_ptr(),
                                           .indices = all_indices.const_data_ptr(),
                                           .in_64_bits = dtype == at::kLong,
                                           .rows = counts.numel(),
                                           .most = indices.size(-1),
                                           .width = width,
                                           .mask = mask.mutable_data_ptr<bool>()};
  launch(counts.device(), [&](void* stream) { return kernels().gpu.block_mask(params, stream); });
  return mask;
}

}  // namespace flash_attn_ext::host
