#include "kernels/cpu/products/few_rows.h"

#include <algorithm>

#include "kernels/cpu/rows/simd.h"

namespace flash_attn_ext::cpu {
namespace {

constexpr int64_t kTerms = 8;
constexpr int64_t kDots = 4;  // at a time: they share what is read of a

// c[0 .. n) (+)= the sum of kTerms rows of b, each times its weight.
template <class Real>
FLASH_SIMD_INLINE void add_weighted_rows(int64_t n, const Real* weights, Block<const Real> b, Real* c, bool add) {
  const Real w0 = weights[0], w1 = weights[1], w2 = weights[2], w3 = weights[3];
  const Real w4 = weights[4], w5 = weights[5], w6 = weights[6], w7 = weights[7];
  const Real *b0 = b.row(0), *b1 = b.row(1), *b2 = b.row(2), *b3 = b.row(3);
  const Real *b4 = b.row(4), *b5 = b.row(5), *b6 = b.row(6), *b7 = b.row(7);
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) {
    const Real low = w0 * b0[j] + w1 * b1[j] + w2 * b2[j] + w3 * b3[j];
    const Real high = w4 * b4[j] + w5 * b5[j] + w6 * b6[j] + w7 * b7[j];
    c[j] = (add ? c[j] : Real(0)) + (low + high);
  }
}

template <class Real>
FLASH_SIMD_INLINE void multiply_impl(const GemmShape& shape, Block<const Real> a, Block<const Real> b, Block<Real> c,
                                     Accumulate mode) {
  bool add = mode == Accumulate::kYes;
  int64_t t = 0;
  for (; t + kTerms <= shape.k; t += kTerms) {
    for (int64_t i = 0; i < shape.m; ++i) {
      add_weighted_rows<Real>(shape.n, a.row(i) + t, {b.row(t), b.stride}, c.row(i), add);
    }
    add = true;
  }
  for (; t < shape.k; ++t) {
    for (int64_t i = 0; i < shape.m; ++i) {
      const Real weight = a.row(i)[t];
      const Real* row = b.row(t);
      Real* sums = c.row(i);
#pragma omp simd
      for (int64_t j = 0; j < shape.n; ++j) sums[j] = (add ? sums[j] : Real(0)) + weight * row[j];
    }
    add = true;
  }
}

// A dot product's sums in as many lanes as the widest vector has elements, added up by halves. Compilers keep vector
// types in registers; what they make of a reduction adds the lanes up one by one, in memory.
template <class Real>
class Lanes {
 public:
  static constexpr int64_t kNum = 64 / sizeof(Real);

  FLASH_SIMD_INLINE void add(const Real* x, const Real* y) {
    Vector a, b;
    __builtin_memcpy(&a, x, sizeof a);
    __builtin_memcpy(&b, y, sizeof b);
    sums_ += a * b;
  }

  FLASH_SIMD_INLINE Real total() const {
    Half halves[2];
    __builtin_memcpy(halves, &sums_, sizeof sums_);
    halves[0] += halves[1];
    Quarter quarters[2];
    __builtin_memcpy(quarters, halves, sizeof quarters);
    const Quarter sums = quarters[0] + quarters[1];
    if constexpr (sizeof(Real) == 8) {
      return sums[0] + sums[1];
    } else {
      return (sums[0] + sums[2]) + (sums[1] + sums[3]);
    }
  }

 private:
  typedef Real Vector __attribute__((vector_size(64)));
  typedef Real Half __attribute__((vector_size(32)));
  typedef Real Quarter __attribute__((vector_size(16)));

  Vector sums_ = {};
};

// c[0 .. kCount) = the dots of `row` with kCount rows of b.
template <int64_t kCount, class Real>
FLASH_SIMD_INLINE void dots(int64_t n, const Real* row, Block<const Real> b, Real* c) {
  Lanes<Real> lanes[kCount];
  int64_t t = 0;
  for (; t + Lanes<Real>::kNum <= n; t += Lanes<Real>::kNum) {
#pragma GCC unroll 4
    for (int64_t j = 0; j < kCount; ++j) lanes[j].add(row + t, b.row(j) + t);
  }
#pragma GCC unroll 4
  for (int64_t j = 0; j < kCount; ++j) {
    Real sum = lanes[j].total();
    for (int64_t u = t; u < n; ++u) sum += row[u] * b.row(j)[u];
    c[j] = sum;
  }
}

template <class Real>
FLASH_SIMD_INLINE void multiply_transposed_impl(const GemmShape& shape, Block<const Real> a, Block<const Real> b,
                                                Block<Real> c) {
  int64_t j = 0;
  for (; j + kDots <= shape.n; j += kDots) {
    for (int64_t i = 0; i < shape.m; ++i) dots<kDots, Real>(shape.k, a.row(i), {b.row(j), b.stride}, c.row(i) + j);
  }
  for (; j < shape.n; ++j) {
    for (int64_t i = 0; i < shape.m; ++i) dots<1, Real>(shape.k, a.row(i), {b.row(j), b.stride}, c.row(i) + j);
  }
}

}  // namespace

FLASH_SIMD_CLONES void multiply_few_rows(const GemmShape& shape, Block<const float> a, Block<const float> b,
                                         Block<float> c, Accumulate mode) {
  multiply_impl(shape, a, b, c, mode);
}
FLASH_SIMD_CLONES void multiply_few_rows(const GemmShape& shape, Block<const double> a, Block<const double> b,
                                         Block<double> c, Accumulate mode) {
  multiply_impl(shape, a, b, c, mode);
}

FLASH_SIMD_CLONES void multiply_few_rows_transposed(const GemmShape& shape, Block<const float> a, Block<const float> b,
                                                    Block<float> c) {
  multiply_transposed_impl(shape, a, b, c);
}
FLASH_SIMD_CLONES void multiply_few_rows_transposed(const GemmShape& shape, Block<const double> a,
                                                    Block<const double> b, Block<double> c) {
  multiply_transposed_impl(shape, a, b, c);
}

}  // namespace flash_attn_ext::cpu
