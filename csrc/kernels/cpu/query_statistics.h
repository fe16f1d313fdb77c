// LSE, its residual and delta of a run of queries, as the gradient of a score needs them.
#pragma once

#include <cmath>
#include <limits>

#include "attention/params.h"
#include "kernels/cpu/scratch.h"
#include "kernels/tile_config.h"

namespace flash_attn_ext::cpu {

template <class Real>
class QueryStatistics {
 public:
  QueryStatistics() : lse_(kStreamedRows), residual_(kStreamedRows), delta_(kStreamedRows) {}

  // Queries [first, first + count) of the sequence; the entries up to `width` get those of a query that sees nothing.
  void load(const attention::BackwardParams& p, const attention::Sequence& sequence, int64_t head, int64_t first,
            int64_t count, int64_t width) {
    constexpr Real kInfinity = std::numeric_limits<Real>::infinity();
    const int64_t row = sequence.query_begin + first;
    for (int64_t i = 0; i < count; ++i) {
      const Real lse = *p.lse.template at<const Real>(sequence.batch, head, row + i);
      // exp(score - inf) = 0: the row's probabilities and gradients vanish without a branch.
      lse_.data()[i] = lse == -kInfinity ? kInfinity : lse;
      residual_.data()[i] =
          p.lse_residual.present() ? *p.lse_residual.template at<const Real>(sequence.batch, head, row + i) : Real(0);
      delta_.data()[i] = *p.delta.template at<const Real>(sequence.batch, head, row + i);
    }
    for (int64_t i = count; i < width; ++i) {
      lse_.data()[i] = kInfinity;
      residual_.data()[i] = Real(0);
      delta_.data()[i] = Real(0);
    }
  }

  const Real* lse() const { return lse_.data(); }
  const Real* residual() const { return residual_.data(); }
  const Real* delta() const { return delta_.data(); }

 private:
  Scratch<Real> lse_, residual_, delta_;
};

}  // namespace flash_attn_ext::cpu
