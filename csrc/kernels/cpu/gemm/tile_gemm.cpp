#include "kernels/cpu/gemm/tile_gemm.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/cpu/gemm/microkernel.h"
#include "kernels/cpu/services.h"

namespace flash_attn_ext::cpu {
namespace {

constexpr int64_t kFewRows = 4;
constexpr int64_t kFewTerms = 8;

// Whether loops over few rows are faster than the microkernel for this shape.
bool is_small(const GemmShape& shape) { return shape.m <= kFewRows || shape.k <= kFewTerms; }

// Computes a GEMM with an empty dimension: without terms nothing else would write c, and oneDNN refuses some.
template <class Real>
bool multiply_empty(const GemmShape& shape, Block<Real> c, Accumulate mode) {
  if (shape.m > 0 && shape.n > 0 && shape.k > 0) return false;
  if (mode == Accumulate::kNo) {
    for (int64_t i = 0; i < shape.m; ++i) std::fill_n(c.row(i), shape.n, Real(0));
  }
  return true;
}

template <class Real>
GemmCall<Real, Real> gemm_call(const GemmShape& shape, Block<const Real> a, Block<const Real> b, Block<Real> c,
                               Accumulate mode) {
  return {.m = shape.m,
          .n = shape.n,
          .k = shape.k,
          .a = a.data,
          .lda = a.stride,
          .b = b.data,
          .ldb = b.stride,
          .c = c.data,
          .ldc = c.stride,
          .adds = mode == Accumulate::kYes};
}

// Calls gemm for some terms after the others, so that each sum is short.
template <class Call>
void multiply_in_steps(const Call& call, int64_t terms, void (*gemm)(const Call&)) {
  Call step = call;
  for (int64_t first = 0; first < call.k; first += terms) {
    step.k = std::min(terms, call.k - first);
    step.a = call.a + first;
    step.b = call.b + first * call.ldb;
    step.adds = call.adds || first > 0;
    gemm(step);
  }
}

// Calls the microkernel for some terms after the others.
template <class Real>
void multiply_with_microkernel(const GemmShape& shape, Block<const Real> a, Block<const Real> b, Block<Real> c,
                               Accumulate mode) {
  if (multiply_empty(shape, c, mode)) return;
  if (is_small(shape)) return multiply_few_rows(shape, a, b, c, mode);
  void (*gemm)(const GemmCall<Real, Real>&) = multiply_in_registers;
  multiply_in_steps(gemm_call(shape, a, b, c, mode), kMicrokernelTerms, gemm);
}

// How many terms of bfloat16 are added up before their sum is added to the others. oneDNN's GEMM adds terms one after
// another, so its error grows with their number. PyTorch's own GEMMs keep several sums, for few rows as many as a
// vector has elements. Short sums are as exact as these, and each costs one more read and write of c.
int64_t terms_of_a_sum(const GemmShape& shape) { return shape.m <= kFewRows ? 8 : 32; }

}  // namespace

void multiply(const GemmShape& shape, Block<const float> a, Block<const float> b, Block<float> c, Accumulate mode) {
  multiply_with_microkernel(shape, a, b, c, mode);
}

void multiply(const GemmShape& shape, Block<const double> a, Block<const double> b, Block<double> c, Accumulate mode) {
  multiply_with_microkernel(shape, a, b, c, mode);
}

bool can_multiply_pairs() {
  static const bool available = services().has_tile_gemm_bf16();
  return available;
}

void release_pairs() { services().release_tiles(); }

void multiply_pairs(const GemmShape& shape, Block<const uint16_t> a, Block<const float> b, Block<float> c) {
  if (multiply_empty(shape, c, Accumulate::kNo)) return;
  const BFloat16Gemm call = {.m = shape.m,
                             .n = shape.n,
                             .k = shape.k,
                             .a = a.data,
                             .lda = a.stride,
                             .b = reinterpret_cast<const uint16_t*>(b.data),
                             .ldb = b.stride,
                             .c = c.data,
                             .ldc = c.stride,
                             .adds = false};
  multiply_in_steps(call, terms_of_a_sum(shape), services().tile_gemm_bf16);
}

template <class Real>
void multiply_nonzero(const GemmShape& shape, Block<const Real> a, Block<const Real> b, Block<Real> c) {
  std::vector<Real> finite(shape.k * shape.n);
  for (int64_t t = 0; t < shape.k; ++t) {
    for (int64_t j = 0; j < shape.n; ++j) {
      finite[t * shape.n + j] = std::isfinite(b.row(t)[j]) ? b.row(t)[j] : Real(0);
    }
  }
  multiply(shape, a, {finite.data(), shape.n}, c, Accumulate::kYes);
  for (int64_t t = 0; t < shape.k; ++t) {
    for (int64_t j = 0; j < shape.n; ++j) {
      const Real value = b.row(t)[j];
      if (std::isfinite(value)) continue;
      for (int64_t i = 0; i < shape.m; ++i) {
        const Real weight = a.row(i)[t];
        if (weight != Real(0)) c.row(i)[j] += weight * value;
      }
    }
  }
}

template void multiply_nonzero<float>(const GemmShape&, Block<const float>, Block<const float>, Block<float>);
template void multiply_nonzero<double>(const GemmShape&, Block<const double>, Block<const double>, Block<double>);

}  // namespace flash_attn_ext::cpu
