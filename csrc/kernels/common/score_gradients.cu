#include "kernels/common/score_gradients.h"

namespace flash_attn_ext::common {
namespace {

constexpr int kThreads = 256;

// One block a head. A thread adds up every kThreads-th query of each batch entry in order; then a tree.
__global__ void __launch_bounds__(kThreads) dsink_kernel(const __grid_constant__ attention::BackwardParams p) {
  __shared__ double sums[kThreads];
  const int64_t head = blockIdx.x;
  const float sink = static_cast<const float*>(p.sink)[head];
  double sum = 0.0;
  for (int64_t batch = 0; batch < p.batch; ++batch) {
    const attention::Sequence sequence = p.sequences.at(batch);
    for (int64_t query = threadIdx.x; query < sequence.num_queries; query += kThreads) {
      const int64_t row = sequence.query_begin + query;
      const float lse = *p.lse.at<const float>(batch, head, row);
      const float residual = p.lse_residual.present() ? *p.lse_residual.at<const float>(batch, head, row) : 0.0f;
      // A sink of -inf is no sink; then the LSE may be -inf too.
      const float probability = sink == -INFINITY ? 0.0f : expf((sink - lse) - residual);
      if (probability != 0.0f) sum -= double{probability} * double{*p.delta.at<const float>(batch, head, row)};
    }
  }
  sums[threadIdx.x] = sum;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) static_cast<float*>(p.dsink)[head] = static_cast<float>(sums[0]);
}

// One thread a (batch, head).
__global__ void __launch_bounds__(kThreads) dalibi_kernel(const __grid_constant__ attention::BackwardParams p) {
  const int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row >= p.batch * p.num_heads_q) return;
  double sum = 0.0;
  for (int64_t i = 0; i < p.alibi_partials_per_head; ++i) sum += p.alibi_partials[row * p.alibi_partials_per_head + i];
  static_cast<float*>(p.dalibi_slopes)[row] = static_cast<float>(sum);
}

}  // namespace

cudaError_t launch_dsink(const attention::BackwardParams& params, cudaStream_t stream) {
  dsink_kernel<<<static_cast<unsigned>(params.num_heads_q), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t launch_dalibi(const attention::BackwardParams& params, cudaStream_t stream) {
  const int64_t blocks = (params.batch * params.num_heads_q + kThreads - 1) / kThreads;
  dalibi_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace flash_attn_ext::common
