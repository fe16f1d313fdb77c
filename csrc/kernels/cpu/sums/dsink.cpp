// dSink: a sink's probability exp(sink - lse) has no value row, so its dP is 0 and its gradient is
// -sum over batch entries and queries of exp(sink - lse) * delta.
#include <cmath>

#include "attention/online_softmax.h"
#include "kernels/cpu/cpu_kernels.h"
#include "kernels/cpu/services.h"

namespace flash_attn_ext::cpu {
namespace {

template <class Real>
void backward_dsink_as(const attention::BackwardParams& p) {
  parallel_for(p.num_heads_q, 1, [&](int64_t begin, int64_t end) {
    for (int64_t head = begin; head < end; ++head) {
      const Real sink = static_cast<const Real*>(p.sink)[head];
      double sum = 0.0;
      for (int64_t batch = 0; batch < p.batch; ++batch) {
        const attention::Sequence sequence = p.sequences.at(batch);
        for (int64_t row = sequence.query_begin; row < sequence.query_begin + sequence.num_queries; ++row) {
          const auto statistic = [&](const attention::StatisticView& view) {
            return view.present() ? *view.at<const Real>(batch, head, row) : Real(0);
          };
          const Real lse = statistic(p.lse);
          // A sink of -inf is no sink; then the LSE may be -inf too.
          if (std::isinf(sink) && sink < 0) continue;
          const double probability = std::exp((double{sink} - lse) - statistic(p.lse_residual));
          const Real delta = attention::delta_for_sink(sink, lse, statistic(p.delta), statistic(p.dlse));
          if (probability != 0.0) sum -= probability * delta;
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
