// The state of a softmax whose scores arrive tile by tile (Milakov & Gimelshein 2018; Dao et al. 2022, section 3.1).
#pragma once

#include <cmath>
#include <limits>

#include "attention/host_device.h"

namespace flash_attn_ext::attention {

template <class Real>
struct LogSumExp {
  Real value;     // natural log; -inf for a row that sees no key
  Real residual;  // the value's rounding error: value + residual has twice the precision

  // Adds a finite number that was subtracted from all scores (Knuth's two-sum).
  FLASH_HOST_DEVICE LogSumExp plus(Real number) const {
    const Real sum = value + number;
    if (sum - sum != Real(0)) return {sum, residual};
    const Real added = sum - value;
    return {sum, ((value - (sum - added)) + (number - added)) + residual};
  }
};

template <class Real>
struct SoftmaxState {
  static constexpr Real kMinusInfinity = -std::numeric_limits<Real>::infinity();

  Real m = kMinusInfinity;  // largest score so far
  Real l = Real(0);         // sum of exp(score - m) so far

  // The number to subtract from scores before exp. A row that has seen nothing subtracts 0, since -inf - (-inf) is NaN.
  FLASH_HOST_DEVICE Real shift() const { return m == kMinusInfinity ? Real(0) : m; }

  // Raises the row maximum to `candidate` if that is larger, and rescales l. Returns the factor by which the caller
  // rescales the outputs so far.
  FLASH_HOST_DEVICE Real raise_maximum(Real candidate) {
    const Real raised = candidate > m ? candidate : m;
    // NaN scores do not raise m; they reach l through exp.
    const Real factor = m == kMinusInfinity ? Real(0) : std::exp(m - raised);
    m = raised;
    l *= factor;
    return factor;
  }

  // Merges the state of other keys of the same row into this one. The caller multiplies the other's outputs by
  // exp(other.m - shift()) after the merge, and this one's by the factor that is returned.
  FLASH_HOST_DEVICE Real merge(const SoftmaxState& other) {
    const Real factor = raise_maximum(other.m);
    l += other.l * std::exp(other.m - shift());
    return factor;
  }

  // A sink is a logit that joins the denominator and has no value row (Xiao et al. 2023).
  FLASH_HOST_DEVICE Real add_sink(Real sink) {
    const Real factor = raise_maximum(sink);
    l += std::exp(sink - shift());
    return factor;
  }

  FLASH_HOST_DEVICE Real output_factor() const { return l == Real(0) ? Real(0) : Real(1) / l; }

  FLASH_HOST_DEVICE LogSumExp<Real> log_sum_exp() const {
    return log_sum_exp([](Real x) { return std::log(x); });
  }
  template <class Log>
  FLASH_HOST_DEVICE LogSumExp<Real> log_sum_exp(Log&& log) const {
    if (l == Real(0)) return {kMinusInfinity, Real(0)};
    const Real log_l = log(l);
    const Real value = m + log_l;
    // The residual is exact (Dekker's fast two-sum) when |m| >= |log l|. Otherwise the value itself is small and
    // already precise.
    return {value, (m - value) + log_l};
  }
};

// The delta to use in a sink's gradient, -exp(sink - lse) * delta. A row that sees no key has lse = sink and out = 0,
// whatever dout holds. If its delta is not finite, only the LSE's own gradient counts, or 0 if that is not finite
// either.
template <class Real>
FLASH_HOST_DEVICE Real delta_for_sink(Real sink, Real lse, Real delta, Real dlse) {
  const auto finite = [](Real x) { return x - x == Real(0); };
  if (finite(delta) || lse != sink) return delta;
  return finite(dlse) ? -dlse : Real(0);
}

}  // namespace flash_attn_ext::attention
