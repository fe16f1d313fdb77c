// dSink: a sink's probability exp(sink - lse) has no value row, so its dP is 0 and its gradient is
// -sum over batch entries and queries of exp(sink - lse) * delta.
#include <ATen/Parallel.h>

#include <cmath>

#include "kernels/cpu/cpu_kernels.h"

namespace flash_attn_ext::cpu {
namespace {

template <class Real>
void backward_dsink_as(const attention::BackwardParams& p) {
  at::parallel_for(0, p.num_heads_q, 1, [&](int64_t begin, int64_t end) {
    for (int64_t head = begin; head < end; ++head) {
      const double sink = static_cast<const Real*>(p.sink)[head];
      double sum = 0.0;
      for (int64_t batch = 0; batch < p.batch; ++batch) {
        const attention::Sequence sequence = p.sequences.at(batch);
        const Real* lse = p.lse.at<const Real>(batch, head, sequence.query_begin);
        const Real* delta = p.delta.at<const Real>(batch, head, sequence.query_begin);
        for (int64_t query = 0; query < sequence.num_queries; ++query) {
          const double residual = p.lse_residual.present()
                                      ? *p.lse_residual.at<const Real>(batch, head, sequence.query_begin + query)
                                      : 0.0;
          // A sink of -inf is no sink; then the LSE may be -inf too.
          const double probability = std::isinf(sink) && sink < 0 ? 0.0 : std::exp((sink - lse[query]) - residual);
          if (probability != 0.0) sum -= probability * delta[query];
        }
      }
      static_cast<Real*>(p.dsink)[head] = static_cast<Real>(sum);
    }
  });
}

}  // namespace

void backward_dsink(const attention::BackwardParams& params) {
  params.element == attention::ElementType::kFloat64 ? backward_dsink_as<double>(params)
                                                     : backward_dsink_as<float>(params);
}

}  // namespace flash_attn_ext::cpu
