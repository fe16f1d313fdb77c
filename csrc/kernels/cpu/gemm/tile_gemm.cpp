#include "kernels/cpu/gemm/tile_gemm.h"

#include <ATen/native/CPUBlas.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>
#include <c10/core/GradMode.h>
#include <c10/util/BFloat16.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <vector>

namespace flash_attn_ext::cpu {
namespace {

// ATen's small-tile GEMM (oneDNN's, generated for the shape) exists only for CPUs with AVX-512, and that of bfloat16
// for those with instructions for it; asking is the only way to know.
template <class Element>
bool has_small_tile_gemm(bool is_pairs) {
  const Element ones[2] = {Element(1.0f), Element(1.0f)};
  float c = 0.0f;
  try {
    at::native::cpublas::brgemm(1, 1, 2, 2, 1, 1, /*add_C=*/false, ones, ones, &c, is_pairs);
  } catch (const std::exception&) {
    return false;
  }
  return true;
}

// Whether there is one for float32. With vectors of 512 bits it is faster than ATen's general GEMM on these shapes
// (docs/kernels/log/cpu.md).
bool has_small_tile_gemm() {
  static const bool available = has_small_tile_gemm<float>(/*is_pairs=*/false);
  return available;
}

constexpr int64_t kFewRows = 4;
constexpr int64_t kFewTerms = 8;

// Whether our own loops are faster than the library for this shape.
bool is_small(const GemmShape& shape) { return shape.m <= kFewRows || shape.k <= kFewTerms; }

// Computes a GEMM with an empty dimension, because the libraries refuse some of these.
template <class Real>
bool multiply_empty(const GemmShape& shape, Block<Real> c, Accumulate mode) {
  if (shape.m > 0 && shape.n > 0 && shape.k > 0) return false;
  if (mode == Accumulate::kNo) {
    for (int64_t i = 0; i < shape.m; ++i) std::fill_n(c.row(i), shape.n, Real(0));
  }
  return true;
}

template <class Real>
void multiply_general(const GemmShape& shape, Block<const Real> a, Block<const Real> b, Block<Real> c,
                      Accumulate mode) {
  const c10::NoGradGuard no_grad;
  const auto options = at::TensorOptions().dtype(c10::CppTypeToScalarType<Real>::value);
  const auto view = [&](const Real* data, int64_t rows, int64_t columns, int64_t stride) {
    return at::from_blob(const_cast<Real*>(data), {rows, columns}, {stride, 1}, options);
  };
  at::Tensor out = view(c.data, shape.m, shape.n, c.stride);
  const at::Tensor left = view(a.data, shape.m, shape.k, a.stride);
  const at::Tensor right = view(b.data, shape.k, shape.n, b.stride);
  if (mode == Accumulate::kYes) {
    out.addmm_(left, right);
  } else {
    at::mm_out(out, left, right);
  }
}

// How many terms are added up before their sum is added to the others. The small-tile GEMM adds terms one after
// another, so its error grows with their number. PyTorch's own GEMMs keep several sums, for few rows as many as a
// vector has elements. Short sums are as exact as these, and each costs one more read and write of c.
int64_t terms_of_a_sum(const GemmShape& shape) { return shape.m <= kFewRows ? 8 : 32; }

}  // namespace

void multiply(const GemmShape& shape, Block<const float> a, Block<const float> b, Block<float> c, Accumulate mode) {
  if (multiply_empty(shape, c, mode)) return;
  if (is_small(shape)) return multiply_few_rows(shape, a, b, c, mode);
  if (!has_small_tile_gemm()) return multiply_general(shape, a, b, c, mode);
  const int64_t terms = terms_of_a_sum(shape);
  for (int64_t first = 0; first < shape.k; first += terms) {
    at::native::cpublas::brgemm(shape.m, shape.n, std::min(terms, shape.k - first), a.stride, b.stride, c.stride,
                                /*add_C=*/first > 0 || mode == Accumulate::kYes, a.data + first, b.row(first), c.data,
                                /*is_vnni=*/false);
  }
}

void multiply(const GemmShape& shape, Block<const double> a, Block<const double> b, Block<double> c, Accumulate mode) {
  if (multiply_empty(shape, c, mode)) return;
  if (is_small(shape)) return multiply_few_rows(shape, a, b, c, mode);
  multiply_general(shape, a, b, c, mode);
}

bool can_multiply_pairs() {
  static const bool available = has_small_tile_gemm<c10::BFloat16>(/*is_pairs=*/true);
  return available;
}

void release_pairs() { at::native::cpublas::brgemm_release(/*is_vnni=*/true); }

void multiply_pairs(const GemmShape& shape, Block<const uint16_t> a, Block<const float> b, Block<float> c) {
  if (multiply_empty(shape, c, Accumulate::kNo)) return;
  const int64_t terms = terms_of_a_sum(shape);
  for (int64_t first = 0; first < shape.k; first += terms) {
    at::native::cpublas::brgemm(shape.m, shape.n, std::min(terms, shape.k - first), a.stride, b.stride, c.stride,
                                /*add_C=*/first > 0, reinterpret_cast<const c10::BFloat16*>(a.data + first),
                                reinterpret_cast<const c10::BFloat16*>(b.row(first / 2)), c.data, /*is_vnni=*/true);
  }
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
