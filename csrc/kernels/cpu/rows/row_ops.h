// Operations on one row of a score tile, vectorised along the row. Rows are contiguous.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/division.h"
#include "attention/score_mod.h"
#include "kernels/cpu/rows/narrow_float.h"
#include "kernels/cpu/rows/vector_math.h"

namespace flash_attn_ext::cpu {

template <class Real>
using Transform = attention::ScoreTransform<Real, VectorMath>;

// x *= factor.
void multiply_row(float* x, int64_t n, float factor);
void multiply_row(double* x, int64_t n, double factor);

// x *= y elementwise.
void multiply_rows(float* x, const float* y, int64_t n);
void multiply_rows(double* x, const double* y, int64_t n);

// Rows of a score tile: n elements of each, `stride` apart. The functions below compute whole vectors if the stride
// leaves room for them, so they use the columns from n to padded() as scratch memory. Short rows are fast because one
// call does a whole tile.
template <class Real>
struct ScoreRows {
  static constexpr int64_t kLanes = 16;

  Real* data;
  int64_t stride;
  int64_t rows;
  int64_t n;

  // Whether rows shorter than a vector lie side by side, so that all of them are one long row.
  bool without_gaps() const { return stride == n && n < kLanes; }
  int64_t padded() const { return std::min(attention::ceil_div(n, kLanes) * kLanes, stride); }
};

// Turns products into scores in place. maxima[i] is the maximum of row i (-inf if n is 0; NaN scores do not count).
void scale_rows(const ScoreRows<float>& scores, float scale, float* maxima);
void scale_rows(const ScoreRows<double>& scores, double scale, double* maxima);

// Turns scores of row i into exp(score - shifts[i]) in place. sums[i] is their sum. Before the call, columns from n to
// padded() hold -inf, as scale_rows leaves them.
void exponentiate_rows(const ScoreRows<float>& scores, const float* shifts, float* sums);
void exponentiate_rows(const ScoreRows<double>& scores, const double* shifts, double* sums);

// Turns products into scores in place. Returns their maximum as scale_rows does.
float transform_row(float* scores, const float* added, int64_t n, const Transform<float>& transform);
double transform_row(double* scores, const double* added, int64_t n, const Transform<double>& transform);

// Turns scores into exp(score - shift) in place. Returns their sum.
float exponentiate_row(float* scores, int64_t n, float shift);
double exponentiate_row(double* scores, int64_t n, double shift);

// x += y elementwise.
void add_row(float* x, const float* y, int64_t n);
void add_row(double* x, const double* y, int64_t n);

// x += weight * y elementwise.
void add_weighted_row(float* x, const float* y, int64_t n, float weight);
void add_weighted_row(double* x, const double* y, int64_t n, double weight);

// x = y.
void convert_row(float* x, const BFloat16* y, int64_t n);
void convert_row(float* x, const Float16* y, int64_t n);

// x = factor * y, rounded to the type of x.
void store_row(float* x, const float* y, int64_t n, float factor);
void store_row(double* x, const double* y, int64_t n, double factor);
void store_row(BFloat16* x, const float* y, int64_t n, float factor);
void store_row(Float16* x, const float* y, int64_t n, float factor);

// masked = added, or -inf where mask is 0. Both may be the same row.
void mask_row(float* masked, const float* added, const uint8_t* mask, int64_t n);
void mask_row(double* masked, const double* added, const uint8_t* mask, int64_t n);

// The sum of the elements.
float sum_row(const float* x, int64_t n);
double sum_row(const double* x, int64_t n);

// One row of the backward pass: P = exp(score - lse), dS = P (dP - delta).
template <class Real>
struct GradientRow {
  int64_t n;
  Real* p;        // in: q . k; out: P as it multiplies dO (after dropout)
  Real* ds;       // in: dP = dO . V; out: d loss / d scaled product
  Real lse;       // +inf where the row sees no key
  Real residual;  // from here on only for gradient_row_generic, except delta
  Real delta;
  const Real* added = nullptr;  // ALiBi + bias, -inf where masked
  const Real* keep = nullptr;   // dropout: 0 or 1 / (1 - p); null without
  Real* dscore = nullptr;       // out: d loss / d score; ds itself without a softcap
};

void gradient_row_plain(const GradientRow<float>& row, float scale);
void gradient_row_plain(const GradientRow<double>& row, double scale);
// Computes gradient_row_plain for all rows of a tile. Row i has lse[i] and delta[i], and its ds has the stride of p.
void gradient_rows_plain(const ScoreRows<float>& p, float* ds, const float* lse, const float* delta, float scale);
void gradient_rows_plain(const ScoreRows<double>& p, double* ds, const double* lse, const double* delta, double scale);
void gradient_row_generic(const GradientRow<float>& row, const Transform<float>& transform);
void gradient_row_generic(const GradientRow<double>& row, const Transform<double>& transform);

// Whether every element is finite.
bool all_finite(const float* x, int64_t n);
bool all_finite(const double* x, int64_t n);

}  // namespace flash_attn_ext::cpu
