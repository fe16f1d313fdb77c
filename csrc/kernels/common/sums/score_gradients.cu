#include "attention/division.h"
#include "attention/online_softmax.h"
#include "kernels/common/sums/sums.h"

namespace flash_attn_ext::common {
namespace {

constexpr int kThreads = 256;

// One CTA per head. A thread adds every kThreads-th query of each batch entry in order; then a tree adds the threads'
// sums.
template <class Real>
__global__ void __launch_bounds__(kThreads) dsink_kernel(const __grid_constant__ attention::BackwardParams p) {
  __shared__ double sums[kThreads];
  const int64_t head = blockIdx.x;
  const Real sink = static_cast<const Real*>(p.sink)[head];
  double sum = 0.0;
  for (int64_t batch = 0; batch < p.batch; ++batch) {
    const attention::Sequence sequence = p.sequences.at(batch);
    for (int64_t query = threadIdx.x; query < sequence.num_queries; query += kThreads) {
      const int64_t row = sequence.query_begin + query;
      const Real lse = *p.lse.at<const Real>(batch, head, row);
      const Real residual = p.lse_residual.present() ? *p.lse_residual.at<const Real>(batch, head, row) : Real(0);
      // A sink of -inf means no sink; then the LSE may be -inf, too.
      const Real probability = sink == -INFINITY ? Real(0) : exp((sink - lse) - residual);
      const Real dlse = p.dlse.present() ? *p.dlse.at<const Real>(batch, head, row) : Real(0);
      const Real delta = attention::delta_for_sink(sink, lse, *p.delta.at<const Real>(batch, head, row), dlse);
      if (probability != Real(0)) sum -= double{probability} * double{delta};
    }
  }
  sums[threadIdx.x] = sum;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) static_cast<Real*>(p.dsink)[head] = static_cast<Real>(sums[0]);
}

// One thread per (batch, head).
template <class Real>
__global__ void __launch_bounds__(kThreads)
    dalibi_kernel(const __grid_constant__ attention::BackwardParams p, const AlibiPartials partials) {
  const int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row >= p.batch * p.num_heads_q) return;
  const Real* of_head = static_cast<const Real*>(partials.data) + row * partials.per_head;
  double sum = 0.0;
  for (int64_t i = 0; i < partials.per_head; ++i) sum += of_head[i];
  static_cast<Real*>(p.dalibi_slopes)[row] = static_cast<Real>(sum);
}

bool in_float64(const attention::BackwardParams& params) { return params.element == attention::ElementType::kFloat64; }

}  // namespace

cudaError_t launch_dsink(const attention::BackwardParams& params, cudaStream_t stream) {
  const auto kernel = in_float64(params) ? dsink_kernel<double> : dsink_kernel<float>;
  kernel<<<static_cast<unsigned>(params.num_heads_q), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t launch_dalibi(const attention::BackwardParams& params, const AlibiPartials& partials, cudaStream_t stream) {
  const int64_t blocks = attention::ceil_div(params.batch * params.num_heads_q, kThreads);
  const auto kernel = in_float64(params) ? dalibi_kernel<double> : dalibi_kernel<float>;
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(params, partials);
  return cudaGetLastError();
}

}  // namespace flash_attn_ext::common
