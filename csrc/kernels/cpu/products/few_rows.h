// Products of few rows with many: they take as long as reading the many does, so those are read where they lie, once.
// Row-major, on the calling thread.
#pragma once

#include "kernels/cpu/products/tile_gemm.h"

namespace flash_attn_ext::cpu {

// c (m x n) = a (m x k) . b (k x n), added to c or not. Sums of 8 terms are added up, so that errors grow slowly.
void multiply_few_rows(const GemmShape& shape, Block<const float> a, Block<const float> b, Block<float> c,
                       Accumulate mode);
void multiply_few_rows(const GemmShape& shape, Block<const double> a, Block<const double> b, Block<double> c,
                       Accumulate mode);

// c (m x n) = a^T (a is k x m) . b (k x n), likewise. a is read by columns, so it should have few.
void multiply_few_columns(const GemmShape& shape, Block<const float> a, Block<const float> b, Block<float> c,
                          Accumulate mode);
void multiply_few_columns(const GemmShape& shape, Block<const double> a, Block<const double> b, Block<double> c,
                          Accumulate mode);

// c (m x n) = a (m x k) . b^T (b is n x k). Each element is a sum of its own, whatever m and n.
void multiply_few_rows_transposed(const GemmShape& shape, Block<const float> a, Block<const float> b, Block<float> c);
void multiply_few_rows_transposed(const GemmShape& shape, Block<const double> a, Block<const double> b,
                                  Block<double> c);

// c[i] = a.row(i) . b.row(i), n elements of `rows` rows.
void dot_rows(int64_t rows, int64_t n, Block<const float> a, Block<const float> b, float* c);
void dot_rows(int64_t rows, int64_t n, Block<const double> a, Block<const double> b, double* c);

}  // namespace flash_attn_ext::cpu
