// GEMMs of few rows with many. They take as long as reading the many rows, so these are read in place, once. All
// matrices are row-major, and the calling thread does the work.
#pragma once

#include "kernels/cpu/gemm/tile_gemm.h"

namespace flash_attn_ext::cpu {

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

}  // namespace flash_attn_ext::cpu
