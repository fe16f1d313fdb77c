#include "kernels/cpu/rows/row_ops.h"

#include <limits>

namespace flash_attn_ext::cpu {
namespace {

template <class Real>
FLASH_SIMD_INLINE void multiply_row_impl(Real* x, int64_t n, Real factor) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) x[i] *= factor;
}

template <class Real>
FLASH_SIMD_INLINE void multiply_rows_impl(Real* x, const Real* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) x[i] *= y[i];
}

template <class Real>
FLASH_SIMD_INLINE void add_row_impl(Real* x, const Real* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) x[i] += y[i];
}

template <class Real>
FLASH_SIMD_INLINE void add_weighted_row_impl(Real* x, const Real* y, int64_t n, Real weight) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) x[i] += weight * y[i];
}

template <class Real>
FLASH_SIMD_INLINE Real scale_row_impl(Real* scores, int64_t n, Real scale) {
  Real maximum = -std::numeric_limits<Real>::infinity();
#pragma omp simd reduction(max : maximum)
  for (int64_t i = 0; i < n; ++i) {
    const Real score = scores[i] * scale;
    scores[i] = score;
    maximum = score > maximum ? score : maximum;
  }
  return maximum;
}

template <class Real>
FLASH_SIMD_INLINE void scale_rows_impl(const ScoreRows<Real>& scores, Real scale, Real* maxima) {
  const ScoreRows<Real> s = scores;
  if (s.without_gaps()) {
    multiply_row_impl(s.data, s.rows * s.n, scale);
    const Real* row = s.data;
    for (int64_t i = 0; i < s.rows; ++i, row += s.n) {
      Real maximum = -std::numeric_limits<Real>::infinity();
      for (int64_t j = 0; j < s.n; ++j) maximum = row[j] > maximum ? row[j] : maximum;
      maxima[i] = maximum;
    }
    return;
  }
  for (int64_t i = 0; i < s.rows; ++i) {
    Real* row = s.data + i * s.stride;
    for (int64_t j = s.n; j < s.padded(); ++j) row[j] = row[0];  // this does not change the maximum
    maxima[i] = scale_row_impl(row, s.padded(), scale);
    for (int64_t j = s.n; j < s.padded(); ++j) row[j] = -std::numeric_limits<Real>::infinity();
  }
}

// The same transform with its absent softcap as a constant, so that the loop over it carries no tanh.
template <class Real>
FLASH_SIMD_INLINE Transform<Real> without_softcap(const Transform<Real>& transform) {
  return {transform.scale, Real(0), Real(0)};
}

template <class Real>
FLASH_SIMD_INLINE Real transform_row_impl(Real* scores, const Real* added, int64_t n, const Transform<Real> transform) {
  Real maximum = -std::numeric_limits<Real>::infinity();
#pragma omp simd reduction(max : maximum)
  for (int64_t i = 0; i < n; ++i) {
    const Real score = transform.forward(scores[i], added[i]);
    scores[i] = score;
    maximum = score > maximum ? score : maximum;
  }
  return maximum;
}

template <class Real>
FLASH_SIMD_INLINE Real transform_row_any(Real* scores, const Real* added, int64_t n, const Transform<Real>& transform) {
  return transform.softcap == Real(0) ? transform_row_impl(scores, added, n, without_softcap(transform))
                                      : transform_row_impl(scores, added, n, transform);
}

template <class Real>
FLASH_SIMD_INLINE Real exponentiate_row_impl(Real* scores, int64_t n, Real shift) {
  Real sum = Real(0);
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) {
    const Real p = vector_exp(scores[i] - shift);
    scores[i] = p;
    sum += p;
  }
  return sum;
}

template <class Real>
FLASH_SIMD_INLINE void exponentiate_rows_impl(const ScoreRows<Real>& scores, const Real* shifts, Real* sums) {
  const ScoreRows<Real> s = scores;
  if (s.without_gaps()) {
    Real* row = s.data;
    for (int64_t i = 0; i < s.rows; ++i, row += s.n) {
      for (int64_t j = 0; j < s.n; ++j) row[j] -= shifts[i];
    }
    exponentiate_row_impl(s.data, s.rows * s.n, Real(0));
    row = s.data;
    for (int64_t i = 0; i < s.rows; ++i, row += s.n) {
      Real sum = row[0];
      for (int64_t j = 1; j < s.n; ++j) sum += row[j];
      sums[i] = sum;
    }
    return;
  }
  for (int64_t i = 0; i < s.rows; ++i) sums[i] = exponentiate_row_impl(s.data + i * s.stride, s.padded(), shifts[i]);
}

template <class Real>
FLASH_SIMD_INLINE Real sum_row_impl(const Real* x, int64_t n) {
  Real sum = Real(0);
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += x[i];
  return sum;
}

template <class Real>
FLASH_SIMD_INLINE void mask_row_impl(Real* masked, const Real* added, const uint8_t* mask, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) masked[i] = mask[i] != 0 ? added[i] : -std::numeric_limits<Real>::infinity();
}

template <class Real>
FLASH_SIMD_INLINE void gradient_row_plain_impl(const GradientRow<Real>& row, Real scale) {
  const GradientRow<Real> r = row;
#pragma omp simd
  for (int64_t i = 0; i < r.n; ++i) {
    // The 0 makes the score round as in scale_rows, because a fused multiply-add takes it instead of the LSE. So P is
    // exactly 1 if there is one key.
    const Real score = r.p[i] * scale + Real(0);
    const Real p = vector_exp(score - r.lse);
    const Real ds = p * (r.ds[i] - r.delta);
    r.p[i] = p;
    r.ds[i] = p == Real(0) ? Real(0) : ds;  // where P is 0, dP may be NaN
  }
}

template <class Real>
FLASH_SIMD_INLINE void gradient_rows_plain_impl(const ScoreRows<Real>& rows, Real* ds, const Real* lse,
                                                const Real* delta, Real scale) {
  const ScoreRows<Real> s = rows;
  if (!s.without_gaps()) {
    for (int64_t i = 0; i < s.rows; ++i) {
      const int64_t at = i * s.stride;
      const GradientRow<Real> row = {
          .n = s.padded(), .p = s.data + at, .ds = ds + at, .lse = lse[i], .residual = Real(0), .delta = delta[i]};
      gradient_row_plain_impl(row, scale);
    }
    return;
  }
  Real* p = s.data;
  for (int64_t i = 0; i < s.rows; ++i, p += s.n) {
    for (int64_t j = 0; j < s.n; ++j) p[j] = (p[j] * scale + Real(0)) - lse[i];
  }
  exponentiate_row_impl(s.data, s.rows * s.n, Real(0));
  p = s.data;
  for (int64_t i = 0; i < s.rows; ++i, p += s.n, ds += s.n) {
    for (int64_t j = 0; j < s.n; ++j) ds[j] = p[j] == Real(0) ? Real(0) : p[j] * (ds[j] - delta[i]);
  }
}

template <bool kDropout, bool kSoftcap, class Real>
FLASH_SIMD_INLINE void gradient_row_generic_impl(const GradientRow<Real>& row, const Transform<Real>& given) {
  const GradientRow<Real> r = row;
  const Transform<Real> transform = kSoftcap ? given : without_softcap(given);
#pragma omp simd
  for (int64_t i = 0; i < r.n; ++i) {
    const Real product = r.p[i];
    const Real score = transform.forward(product, r.added[i]);
    // P of a masked key is set to 0 by comparison, because the LSE of a row that holds NaN would make it NaN.
    const Real exponential = vector_exp((score - r.lse) - r.residual);
    const Real p = score == -std::numeric_limits<Real>::infinity() ? Real(0) : exponential;
    const Real kept = kDropout ? r.keep[i] : Real(1);
    const Real dp = kept == Real(0) ? Real(0) : kept * r.ds[i];
    const Real ds = p * (dp - r.delta);
    const Real dscore = p == Real(0) ? Real(0) : ds;
    r.p[i] = p * kept;
    if (kSoftcap) r.dscore[i] = dscore;
    r.ds[i] = transform.backward(dscore, product);
  }
}

template <class Real>
FLASH_SIMD_INLINE void gradient_row_generic_any(const GradientRow<Real>& row, const Transform<Real>& transform) {
  if (transform.softcap != Real(0)) {
    row.keep ? gradient_row_generic_impl<true, true>(row, transform)
             : gradient_row_generic_impl<false, true>(row, transform);
  } else {
    row.keep ? gradient_row_generic_impl<true, false>(row, transform)
             : gradient_row_generic_impl<false, false>(row, transform);
  }
}

template <class Real>
FLASH_SIMD_INLINE bool all_finite_impl(const Real* x, int64_t n) {
  Real sum = Real(0);  // x * 0 is 0 for a finite x and NaN for the others
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += x[i] * Real(0);
  return sum == Real(0);
}

}  // namespace

FLASH_SIMD_CLONES void multiply_row(float* x, int64_t n, float factor) { multiply_row_impl(x, n, factor); }
FLASH_SIMD_CLONES void multiply_row(double* x, int64_t n, double factor) { multiply_row_impl(x, n, factor); }

FLASH_SIMD_CLONES void multiply_rows(float* x, const float* y, int64_t n) { multiply_rows_impl(x, y, n); }
FLASH_SIMD_CLONES void multiply_rows(double* x, const double* y, int64_t n) { multiply_rows_impl(x, y, n); }

FLASH_SIMD_CLONES void scale_rows(const ScoreRows<float>& scores, float scale, float* maxima) {
  scale_rows_impl(scores, scale, maxima);
}
FLASH_SIMD_CLONES void scale_rows(const ScoreRows<double>& scores, double scale, double* maxima) {
  scale_rows_impl(scores, scale, maxima);
}

FLASH_SIMD_CLONES void exponentiate_rows(const ScoreRows<float>& scores, const float* shifts, float* sums) {
  exponentiate_rows_impl(scores, shifts, sums);
}
FLASH_SIMD_CLONES void exponentiate_rows(const ScoreRows<double>& scores, const double* shifts, double* sums) {
  exponentiate_rows_impl(scores, shifts, sums);
}

FLASH_SIMD_CLONES float transform_row(float* scores, const float* added, int64_t n, const Transform<float>& transform) {
  return transform_row_any(scores, added, n, transform);
}
FLASH_SIMD_CLONES double transform_row(double* scores, const double* added, int64_t n,
                                       const Transform<double>& transform) {
  return transform_row_any(scores, added, n, transform);
}

FLASH_SIMD_CLONES float exponentiate_row(float* scores, int64_t n, float shift) {
  return exponentiate_row_impl(scores, n, shift);
}
FLASH_SIMD_CLONES double exponentiate_row(double* scores, int64_t n, double shift) {
  return exponentiate_row_impl(scores, n, shift);
}

FLASH_SIMD_CLONES void add_row(float* x, const float* y, int64_t n) { add_row_impl(x, y, n); }
FLASH_SIMD_CLONES void add_row(double* x, const double* y, int64_t n) { add_row_impl(x, y, n); }

FLASH_SIMD_CLONES void add_weighted_row(float* x, const float* y, int64_t n, float weight) {
  add_weighted_row_impl(x, y, n, weight);
}
FLASH_SIMD_CLONES void add_weighted_row(double* x, const double* y, int64_t n, double weight) {
  add_weighted_row_impl(x, y, n, weight);
}

FLASH_SIMD_CLONES void convert_row(float* x, const BFloat16* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) x[i] = bfloat16_to_float(y[i].bits);
}
FLASH_SIMD_CLONES void convert_row(float* x, const Float16* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) x[i] = float16_to_float(y[i].bits);
}

FLASH_SIMD_CLONES void store_row(float* x, const float* y, int64_t n, float factor) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) x[i] = factor * y[i];
}
FLASH_SIMD_CLONES void store_row(double* x, const double* y, int64_t n, double factor) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) x[i] = factor * y[i];
}
FLASH_SIMD_CLONES void store_row(BFloat16* x, const float* y, int64_t n, float factor) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) x[i].bits = bfloat16_from_float(factor * y[i]);
}
FLASH_SIMD_CLONES void store_row(Float16* x, const float* y, int64_t n, float factor) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) x[i].bits = float16_from_float(factor * y[i]);
}

FLASH_SIMD_CLONES void mask_row(float* masked, const float* added, const uint8_t* mask, int64_t n) {
  mask_row_impl(masked, added, mask, n);
}
FLASH_SIMD_CLONES void mask_row(double* masked, const double* added, const uint8_t* mask, int64_t n) {
  mask_row_impl(masked, added, mask, n);
}

FLASH_SIMD_CLONES float sum_row(const float* x, int64_t n) { return sum_row_impl(x, n); }
FLASH_SIMD_CLONES double sum_row(const double* x, int64_t n) { return sum_row_impl(x, n); }

FLASH_SIMD_CLONES void gradient_row_plain(const GradientRow<float>& row, float scale) {
  gradient_row_plain_impl(row, scale);
}
FLASH_SIMD_CLONES void gradient_row_plain(const GradientRow<double>& row, double scale) {
  gradient_row_plain_impl(row, scale);
}

FLASH_SIMD_CLONES void gradient_rows_plain(const ScoreRows<float>& p, float* ds, const float* lse, const float* delta,
                                           float scale) {
  gradient_rows_plain_impl(p, ds, lse, delta, scale);
}
FLASH_SIMD_CLONES void gradient_rows_plain(const ScoreRows<double>& p, double* ds, const double* lse,
                                           const double* delta, double scale) {
  gradient_rows_plain_impl(p, ds, lse, delta, scale);
}

FLASH_SIMD_CLONES void gradient_row_generic(const GradientRow<float>& row, const Transform<float>& transform) {
  gradient_row_generic_any(row, transform);
}
FLASH_SIMD_CLONES void gradient_row_generic(const GradientRow<double>& row, const Transform<double>& transform) {
  gradient_row_generic_any(row, transform);
}

FLASH_SIMD_CLONES bool all_finite(const float* x, int64_t n) { return all_finite_impl(x, n); }
FLASH_SIMD_CLONES bool all_finite(const double* x, int64_t n) { return all_finite_impl(x, n); }

}  // namespace flash_attn_ext::cpu
