// GEMMs of tiles: c (m x n) = a (m x k) . b (k x n), row-major, on the calling thread. Also those of few rows, and
// transposes.
#pragma once

#include <cstdint>

namespace flash_attn_ext::cpu {

// A row-major block inside a larger matrix: rows are `stride` elements apart.
template <class Real>
struct Block {
  Real* data;
  int64_t stride;

  Real* row(int64_t i) const { return data + i * stride; }
};

// Rows further apart are copied first: oneDNN counts bytes within a tile in 32 bits.
inline constexpr int64_t kLargestStride = int64_t{1} << 20;

struct GemmShape {
  int64_t m;
  int64_t n;
  int64_t k;
};

enum class Accumulate { kNo, kYes };

// Shapes with few rows or few terms use multiply_few_rows, all others the microkernel (microkernel.h).
void multiply(const GemmShape& shape, Block<const float> a, Block<const float> b, Block<float> c, Accumulate mode);
void multiply(const GemmShape& shape, Block<const double> a, Block<const double> b, Block<double> c, Accumulate mode);

// c = a . b for bfloat16, given as its bits. b holds two rows of k as one of pairs: element (t, j) is half t % 2 of
// b.row(t / 2)[j]. k is even.
void multiply_pairs(const GemmShape& shape, Block<const uint16_t> a, Block<const float> b, Block<float> c);

// Releases what a thread holds of the CPU after such GEMMs (the tiles of AMX). The thread calls it after its last one.
void release_pairs();

// Whether this CPU can multiply bfloat16, and faster than float32.
bool can_multiply_pairs();

// c += a . b without the terms whose weight, an element of a, is exactly 0: a key that is not attended must not reach
// the result, even if the other factor is NaN or infinity. It is slower, and only tiles that hold such factors use it.
// Elements that no NaN or infinity reaches have the bits that multiply() gives for finite factors.
template <class Real>
void multiply_nonzero(const GemmShape& shape, Block<const Real> a, Block<const Real> b, Block<Real> c);

// GEMMs of few rows with many take as long as reading the many rows, so these are read in place, once.
//
// c (m x n) = a (m x k) . b (k x n), added to c or not. Terms are summed in groups of 8, so that errors grow slowly.
void multiply_few_rows(const GemmShape& shape, Block<const float> a, Block<const float> b, Block<float> c,
                       Accumulate mode);
void multiply_few_rows(const GemmShape& shape, Block<const double> a, Block<const double> b, Block<double> c,
                       Accumulate mode);

// c (m x n) = a^T (a is k x m) . b (k x n), with the same order of terms as multiply_few_rows. a is read by columns, so
// it should have few.
void multiply_few_columns(const GemmShape& shape, Block<const float> a, Block<const float> b, Block<float> c,
                          Accumulate mode);
void multiply_few_columns(const GemmShape& shape, Block<const double> a, Block<const double> b, Block<double> c,
                          Accumulate mode);

// c (m x n) = a (m x k) . b^T (b is n x k). The order of an element's sum does not depend on m and n.
void multiply_few_rows_transposed(const GemmShape& shape, Block<const float> a, Block<const float> b, Block<float> c);
void multiply_few_rows_transposed(const GemmShape& shape, Block<const double> a, Block<const double> b,
                                  Block<double> c);

// c[i] = a.row(i) . b.row(i) for `rows` rows of n elements.
void dot_rows(int64_t rows, int64_t n, Block<const float> a, Block<const float> b, float* c);
void dot_rows(int64_t rows, int64_t n, Block<const double> a, Block<const double> b, double* c);

// out (columns x rows) = in^T (in is rows x columns).
void transpose(int64_t rows, int64_t columns, Block<const float> in, Block<float> out);
void transpose(int64_t rows, int64_t columns, Block<const double> in, Block<double> out);

}  // namespace flash_attn_ext::cpu
