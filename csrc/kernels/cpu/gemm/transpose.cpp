#include <algorithm>

#include "kernels/cpu/gemm/tile_gemm.h"
#include "kernels/cpu/rows/simd.h"

namespace flash_attn_ext::cpu {
namespace {

constexpr int64_t kSide = 8;  // rows and columns of a block that is transposed in registers

// Transposes the remainder beside whole blocks, element by element.
template <class Real>
FLASH_SIMD_INLINE void transpose_elements(int64_t rows, int64_t columns, Block<const Real> in, Block<Real> out) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) out.row(j)[i] = in.row(i)[j];
  }
}

typedef float Vector __attribute__((vector_size(32)));

// The elements of x and then y with these indices.
template <int... indices>
FLASH_SIMD_INLINE void shuffle(const Vector& x, const Vector& y, Vector& out) {
#if defined(__clang__)
  out = __builtin_shufflevector(x, y, indices...);
#else
  typedef int32_t Indices __attribute__((vector_size(32)));
  out = __builtin_shuffle(x, y, Indices{indices...});
#endif
}

// Transposes by three rounds of shuffles, which exchange single elements, pairs and halves of vectors of 8.
FLASH_SIMD_INLINE void transpose_8_by_8(Block<const float> in, Block<float> out) {
  Vector x[kSide], y[kSide];
#pragma GCC unroll 8
  for (int64_t i = 0; i < kSide; ++i) __builtin_memcpy(&x[i], in.row(i), sizeof(Vector));
#pragma GCC unroll 4
  for (int64_t i = 0; i < kSide; i += 2) {
    shuffle<0, 8, 1, 9, 4, 12, 5, 13>(x[i], x[i + 1], y[i]);
    shuffle<2, 10, 3, 11, 6, 14, 7, 15>(x[i], x[i + 1], y[i + 1]);
  }
#pragma GCC unroll 2
  for (int64_t i = 0; i < kSide; i += 4) {
    shuffle<0, 1, 8, 9, 4, 5, 12, 13>(y[i], y[i + 2], x[i]);
    shuffle<2, 3, 10, 11, 6, 7, 14, 15>(y[i], y[i + 2], x[i + 1]);
    shuffle<0, 1, 8, 9, 4, 5, 12, 13>(y[i + 1], y[i + 3], x[i + 2]);
    shuffle<2, 3, 10, 11, 6, 7, 14, 15>(y[i + 1], y[i + 3], x[i + 3]);
  }
#pragma GCC unroll 4
  for (int64_t i = 0; i < kSide / 2; ++i) {
    shuffle<0, 1, 2, 3, 8, 9, 10, 11>(x[i], x[i + 4], y[i]);
    shuffle<4, 5, 6, 7, 12, 13, 14, 15>(x[i], x[i + 4], y[i + 4]);
  }
#pragma GCC unroll 8
  for (int64_t i = 0; i < kSide; ++i) __builtin_memcpy(out.row(i), &y[i], sizeof(Vector));
}

}  // namespace

FLASH_SIMD_CLONES void transpose(int64_t rows, int64_t columns, Block<const float> in, Block<float> out) {
  const int64_t whole_rows = rows / kSide * kSide, whole_columns = columns / kSide * kSide;
  for (int64_t i = 0; i < whole_rows; i += kSide) {
    for (int64_t j = 0; j < whole_columns; j += kSide) {
      transpose_8_by_8({in.row(i) + j, in.stride}, {out.row(j) + i, out.stride});
    }
  }
  transpose_elements<float>(whole_rows, columns - whole_columns, {in.data + whole_columns, in.stride},
                            {out.row(whole_columns), out.stride});
  transpose_elements<float>(rows - whole_rows, columns, {in.row(whole_rows), in.stride},
                            {out.data + whole_rows, out.stride});
}

void transpose(int64_t rows, int64_t columns, Block<const double> in, Block<double> out) {
  for (int64_t j = 0; j < columns; j += kSide) {  // so that whole cache lines are written
    transpose_elements<double>(rows, std::min(kSide, columns - j), {in.data + j, in.stride}, {out.row(j), out.stride});
  }
}

}  // namespace flash_attn_ext::cpu
