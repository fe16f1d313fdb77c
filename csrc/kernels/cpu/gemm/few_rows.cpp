#include <algorithm>

#include "kernels/cpu/gemm/tile_gemm.h"
#include "kernels/cpu/rows/simd.h"

namespace flash_attn_ext::cpu {
namespace {

constexpr int64_t kTerms = 8;
constexpr int64_t kDots = 4;  // dots at a time, which share what is read of a

// The weights of a row, which lie `step` elements apart.
template <class Real>
struct WeightRow {
  const Real* data;
  int64_t step;
};

// c[0 .. n) (+)= the sum of kCount rows of b, each times its weight.
template <int64_t kCount, class Real>
FLASH_SIMD_INLINE void add_weighted_rows(int64_t n, WeightRow<Real> weights, Block<const Real> b, Real* c, bool add) {
  Real w[kTerms] = {};
  const Real* rows[kTerms] = {};
#pragma GCC unroll 8
  for (int64_t u = 0; u < kCount; ++u) {
    w[u] = weights.data[u * weights.step];
    rows[u] = b.row(u);
  }
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) {
    Real low = Real(0), high = Real(0);
#pragma GCC unroll 8
    for (int64_t u = 0; u < kTerms; ++u) {
      if (u < kCount) (u < kTerms / 2 ? low : high) += w[u] * rows[u][j];
    }
    c[j] = (add ? c[j] : Real(0)) + (low + high);
  }
}

template <class Real>
FLASH_SIMD_INLINE void add_weighted_rows(int64_t count, int64_t n, WeightRow<Real> weights, Block<const Real> b,
                                         Real* c, bool add) {
  switch (count) {
    case 1:
      return add_weighted_rows<1>(n, weights, b, c, add);
    case 2:
      return add_weighted_rows<2>(n, weights, b, c, add);
    case 3:
      return add_weighted_rows<3>(n, weights, b, c, add);
    case 4:
      return add_weighted_rows<4>(n, weights, b, c, add);
    case 5:
      return add_weighted_rows<5>(n, weights, b, c, add);
    case 6:
      return add_weighted_rows<6>(n, weights, b, c, add);
    case 7:
      return add_weighted_rows<7>(n, weights, b, c, add);
    default:
      return add_weighted_rows<8>(n, weights, b, c, add);
  }
}

// c (+)= a . b, or a^T . b.
template <bool kTransposed, class Real>
FLASH_SIMD_INLINE void multiply_impl(const GemmShape& shape, Block<const Real> a, Block<const Real> b, Block<Real> c,
                                     Accumulate mode) {
  bool add = mode == Accumulate::kYes;
  for (int64_t t = 0; t < shape.k; t += kTerms) {
    const int64_t count = std::min(kTerms, shape.k - t);
    for (int64_t i = 0; i < shape.m; ++i) {
      const WeightRow<Real> weights =
          kTransposed ? WeightRow<Real>{a.row(t) + i, a.stride} : WeightRow<Real>{a.row(i) + t, 1};
      add_weighted_rows<Real>(count, shape.n, weights, {b.row(t), b.stride}, c.row(i), add);
    }
    add = true;
  }
}

// The sums of a dot product, in as many lanes as the widest vector has elements. The lanes are added up by halves.
// Compilers keep vector types in registers, whereas their code for a reduction adds the lanes one by one, in memory.
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
  multiply_impl<false>(shape, a, b, c, mode);
}
FLASH_SIMD_CLONES void multiply_few_rows(const GemmShape& shape, Block<const double> a, Block<const double> b,
                                         Block<double> c, Accumulate mode) {
  multiply_impl<false>(shape, a, b, c, mode);
}

FLASH_SIMD_CLONES void multiply_few_columns(const GemmShape& shape, Block<const float> a, Block<const float> b,
                                            Block<float> c, Accumulate mode) {
  multiply_impl<true>(shape, a, b, c, mode);
}
FLASH_SIMD_CLONES void multiply_few_columns(const GemmShape& shape, Block<const double> a, Block<const double> b,
                                            Block<double> c, Accumulate mode) {
  multiply_impl<true>(shape, a, b, c, mode);
}

FLASH_SIMD_CLONES void multiply_few_rows_transposed(const GemmShape& shape, Block<const float> a, Block<const float> b,
                                                    Block<float> c) {
  multiply_transposed_impl(shape, a, b, c);
}
FLASH_SIMD_CLONES void multiply_few_rows_transposed(const GemmShape& shape, Block<const double> a,
                                                    Block<const double> b, Block<double> c) {
  multiply_transposed_impl(shape, a, b, c);
}

FLASH_SIMD_CLONES void dot_rows(int64_t rows, int64_t n, Block<const float> a, Block<const float> b, float* c) {
  for (int64_t i = 0; i < rows; ++i) dots<1, float>(n, a.row(i), {b.row(i), b.stride}, c + i);
}
FLASH_SIMD_CLONES void dot_rows(int64_t rows, int64_t n, Block<const double> a, Block<const double> b, double* c) {
  for (int64_t i = 0; i < rows; ++i) dots<1, double>(n, a.row(i), {b.row(i), b.stride}, c + i);
}

}  // namespace flash_attn_ext::cpu
