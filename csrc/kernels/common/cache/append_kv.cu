// Grid: kRowsPerBlock rows per CTA, a warp each: first those of k_new, then of v_new, then of q. The kernel is
// memory-bound, and in a decoding step bound by launch latency. The split-KV kernel appends keys itself
// (sm80/forward/split/).
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "attention/division.h"
#include "kernels/common/cache/append_kv.h"
#include "kernels/common/rows/appended_row.cuh"

namespace flash_attn_ext::common {
namespace {

using attention::AppendParams;

constexpr int kRowsPerBlock = 4;
constexpr int kThreads = kRowsPerBlock * tile::kWarpSize;

template <class Element>
__global__ void __launch_bounds__(kThreads) append_kernel(const __grid_constant__ AppendParams p) {
  const AppendedRows<Element, Columns::kAnyStride> rows = {p};
  const int64_t index = int64_t{blockIdx.x} * kRowsPerBlock + tile::warp();
  if (index < rows.count()) rows.copy(index);
}

template <class Element>
cudaError_t launch(const AppendParams& p, cudaStream_t stream) {
  const int64_t blocks = attention::ceil_div(AppendedRows<Element, Columns::kAnyStride>{p}.count(), kRowsPerBlock);
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  append_kernel<Element><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

cudaError_t append_kv(const AppendParams& params, cudaStream_t stream) {
  switch (params.element) {
    case attention::ElementType::kFloat32:
      return launch<float>(params, stream);
    case attention::ElementType::kFloat64:
      return launch<double>(params, stream);
    case attention::ElementType::kBFloat16:
      return launch<__nv_bfloat16>(params, stream);
    case attention::ElementType::kFloat16:
      return launch<__half>(params, stream);
    case attention::ElementType::kBool:
      break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace flash_attn_ext::common
