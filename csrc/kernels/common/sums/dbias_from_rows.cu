// Grid: one CTA for each head and batch entry that the bias distinguishes, and kThreads of its queries, one per thread.
// Where the bias is broadcast along queries, too, the CTA sums all of them: each thread adds every kThreads-th query,
// then a tree adds the threads' sums. The kernel is memory-bound: it reads four or five numbers per row.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "attention/dscore_row_sums.h"
#include "kernels/common/sums/sums.h"

namespace flash_attn_ext::common {
namespace {

using attention::BackwardParams;
using attention::BiasGradient;
using attention::ElementType;

constexpr int kThreads = 128;

__device__ __forceinline__ void store(const BiasGradient& g, int64_t offset, double value) {
  switch (g.element) {
    case ElementType::kFloat32:
      static_cast<float*>(g.data)[offset] = static_cast<float>(value);
      break;
    case ElementType::kFloat64:
      static_cast<double*>(g.data)[offset] = value;
      break;
    case ElementType::kBFloat16:
      static_cast<__nv_bfloat16*>(g.data)[offset] = __double2bfloat16(value);
      break;
    case ElementType::kFloat16:
      static_cast<__half*>(g.data)[offset] = __double2half(value);
      break;
    case ElementType::kBool:
      break;  // a bool bias is a mask
  }
}

// Sums over all threads of the CTA; thread 0 gets the result.
__device__ __forceinline__ double sum_over_threads(double value) {
  __shared__ double sums[kThreads];
  __syncthreads();  // no thread reads the preceding sum any more
  sums[threadIdx.x] = value;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  return threadIdx.x == 0 ? sums[0] : 0.0;
}

template <class Real>
__global__ void __launch_bounds__(kThreads) dbias_from_rows_kernel(const __grid_constant__ BackwardParams p) {
  const attention::DbiasOwners owners(p, kThreads);
  for (int64_t index = blockIdx.x; index < owners.count(); index += gridDim.x) {
    const attention::DbiasOwner owner = owners.at(index);
    const int64_t query = owner.queries.begin + threadIdx.x;
    if (p.dbias.per_query) {
      if (query >= owner.queries.end) continue;
      store(p.dbias, owner.offset(p.dbias, query), owner.template finish_delta<Real>(p, {query, query + 1}, 1));
    } else {
      const double sum = sum_over_threads(owner.template finish_delta<Real>(p, {query, owner.queries.end}, kThreads));
      if (threadIdx.x == 0) store(p.dbias, owner.offset(p.dbias, 0), sum);
    }
  }
}

}  // namespace

cudaError_t launch_dbias_from_rows(const BackwardParams& params, cudaStream_t stream) {
  const int64_t blocks = std::min<int64_t>(attention::DbiasOwners(params, kThreads).count(), INT32_MAX);
  if (blocks == 0) return cudaSuccess;
  const auto kernel =
      params.element == ElementType::kFloat64 ? dbias_from_rows_kernel<double> : dbias_from_rows_kernel<float>;
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace flash_attn_ext::common
