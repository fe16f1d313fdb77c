// LSE, its residual and delta of a tile of queries, as the gradient of a score needs them.
#pragma once

#include <limits>

#include "attention/params.h"
#include "kernels/config/cpu.h"
#include "kernels/cpu/scratch.h"

namespace flash_attn_ext::cpu {

template <class Real>
class QueryStatistics {
 public:
  QueryStatistics() : lse_(kStationaryRows), residual_(kStationaryRows), delta_(kStationaryRows) {}

  // Queries [first, first + count) of the sequence.
  void load(const attention::BackwardParams& p, const attention::Sequence& sequence, int64_t head, int64_t first,
            int64_t count) {
    constexpr Real kInfinity = std::numeric_limits<Real>::infinity();
    const int64_t row = sequence.query_begin + first;
    for (int64_t i = 0; i < count; ++i) {
      const Real lse = *p.lse.template at<const Real>(sequence.batch, head, row + i);
      // For a row that sees no key, exp(score - inf) = 0: its probabilities and gradients vanish without a branch.
      lse_.data()[i] = lse == -kInfinity ? kInfinity : lse;
      residual_.data()[i] =
          p.lse_residual.present() ? *p.lse_residual.template at<const Real>(sequence.batch, head, row + i) : Real(0);
      delta_.data()[i] = *p.delta.template at<const Real>(sequence.batch, head, row + i);
    }
  }

  const Real* lse() const { return lse_.data(); }
  const Real* delta() const { return delta_.data(); }
  Real lse(int64_t i) const { return lse_.data()[i]; }
  Real residual(int64_t i) const { return residual_.data()[i]; }
  Real delta(int64_t i) const { return delta_.data()[i]; }

 private:
  Scratch<Real> lse_, residual_, delta_;
};

}  // namespace flash_attn_ext::cpu
