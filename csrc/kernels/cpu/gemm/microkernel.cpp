// A microkernel: a block of c stays in registers while the loop goes over k. Each step reads one element of a for each
// row, broadcasts it, and multiplies it by the same vectors of b. Blocks have as many rows as leave registers for b.
// Vectors have the length of the instruction set's registers: GCC keeps longer ones in memory. Figures are in
// docs/kernels/log/cpu.md, "A GEMM of our own".
#include "kernels/cpu/gemm/microkernel.h"

#include <algorithm>
#include <cassert>

#include "kernels/cpu/rows/simd.h"

namespace flash_attn_ext::cpu {
namespace {

constexpr int64_t kNarrowRows = 8;  // of a block of one vector, so that its sums do not wait for each other

// Vectors of kBytes, and the largest block, of 4 rows. Blocks with fewer vectors have more rows.
template <class Real_, int64_t kBytes, int64_t kBlockRows>
struct Registers {
  using Real = Real_;
  typedef Real Vector __attribute__((vector_size(kBytes)));
  static constexpr int64_t kWidth = kBytes / sizeof(Real);
  static constexpr int64_t kRows = kBlockRows;
  static constexpr int64_t kVectors = kBlockRows == 4 ? 4 : 2;
};

template <class R>
using Call = GemmCall<typename R::Real, typename R::Real>;

// The part of a call that has c's rows from i on, and its columns from j on.
template <class Real>
FLASH_SIMD_INLINE GemmCall<Real, Real> part(const GemmCall<Real, Real>& call, int64_t i, int64_t j) {
  GemmCall<Real, Real> rest = call;
  rest.m -= i;
  rest.n -= j;
  rest.a += i * call.lda;
  rest.b += j;
  rest.c += i * call.ldc + j;
  return rest;
}

// The first kNumRows rows and kNumVectors vectors of c. Meanwhile a column of cache lines of b, from `next` on, comes
// from memory.
template <class R, int64_t kNumRows, int64_t kNumVectors>
FLASH_SIMD_INLINE void multiply_block(const Call<R>& call, const typename R::Real* next) {
  typename R::Vector sums[kNumRows][kNumVectors] = {};
  for (int64_t t = 0; t < call.k; ++t) {
    __builtin_prefetch(next + t * call.ldb);
    typename R::Vector b[kNumVectors];
#pragma GCC unroll 4
    for (int64_t v = 0; v < kNumVectors; ++v) {
      __builtin_memcpy(&b[v], call.b + t * call.ldb + v * R::kWidth, sizeof b[v]);
    }
#pragma GCC unroll 8
    for (int64_t i = 0; i < kNumRows; ++i) {
      const typename R::Real a = call.a[i * call.lda + t];
#pragma GCC unroll 4
      for (int64_t v = 0; v < kNumVectors; ++v) sums[i][v] += a * b[v];
    }
  }
#pragma GCC unroll 8
  for (int64_t i = 0; i < kNumRows; ++i) {
#pragma GCC unroll 4
    for (int64_t v = 0; v < kNumVectors; ++v) {
      typename R::Real* target = call.c + i * call.ldc + v * R::kWidth;
      if (call.adds) {
        typename R::Vector c;
        __builtin_memcpy(&c, target, sizeof c);
        sums[i][v] += c;
      }
      __builtin_memcpy(target, &sums[i][v], sizeof sums[i][v]);
    }
  }
}

// All rows of the first kNumVectors vectors of c. The rows that are left over go to smaller blocks. Each block fetches
// one cache line of each row of b that is needed next: bursts of them would make the block wait.
template <class R, int64_t kNumRows, int64_t kNumVectors>
FLASH_SIMD_INLINE void multiply_columns(const Call<R>& call, const typename R::Real* next) {
  constexpr int64_t kLine = 64 / sizeof(typename R::Real);
  const typename R::Real* last = next + (kNumVectors * R::kWidth - 1) / kLine * kLine;
  int64_t i = 0;
  for (; i + kNumRows <= call.m; i += kNumRows) {
    multiply_block<R, kNumRows, kNumVectors>(part(call, i, 0), next);
    next = std::min(next + kLine, last);
  }
  if constexpr (kNumRows > 1) multiply_columns<R, kNumRows / 2, kNumVectors>(part(call, i, 0), next);
}

// The columns after the last whole vector: b is zero-padded to a vector, so their sums have the same order.
template <class R>
FLASH_SIMD_INLINE void multiply_last_columns(const Call<R>& call) {
  typename R::Real b[kMicrokernelTerms * R::kWidth], c[kNarrowRows * R::kWidth];
  for (int64_t t = 0; t < call.k; ++t) {
    typename R::Real* row = b + t * R::kWidth;
    std::copy_n(call.b + t * call.ldb, call.n, row);
    std::fill(row + call.n, row + R::kWidth, typename R::Real(0));
  }
  for (int64_t i = 0; i < call.m; i += kNarrowRows) {
    const int64_t rows = std::min(kNarrowRows, call.m - i);
    const Call<R> block = {.m = rows,
                           .n = R::kWidth,
                           .k = call.k,
                           .a = call.a + i * call.lda,
                           .lda = call.lda,
                           .b = b,
                           .ldb = R::kWidth,
                           .c = c,
                           .ldc = R::kWidth,
                           .adds = false};
    multiply_columns<R, kNarrowRows, 1>(block, b);
    for (int64_t r = 0; r < rows; ++r) {
      typename R::Real* target = call.c + (i + r) * call.ldc;
      for (int64_t j = 0; j < call.n; ++j) target[j] = c[r * R::kWidth + j] + (call.adds ? target[j] : 0);
    }
  }
}

template <class R>
FLASH_SIMD_INLINE void multiply_tile(const Call<R>& call) {
  constexpr int64_t kColumns = R::kVectors * R::kWidth;
  int64_t j = 0;
  for (; j + kColumns <= call.n; j += kColumns) {
    // After the last columns come the next terms, of this tile or of the one behind it.
    const bool last = j + 2 * kColumns > call.n;
    multiply_columns<R, R::kRows, R::kVectors>(part(call, 0, j), call.b + (last ? call.k * call.ldb : j + kColumns));
  }
  for (; j + R::kWidth <= call.n; j += R::kWidth) {
    multiply_columns<R, kNarrowRows, 1>(part(call, 0, j), call.b + j + R::kWidth);
  }
  if (j < call.n) multiply_last_columns<R>(part(call, 0, j));
}

#if defined(FLASH_SIMD_LEVEL)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"  // Clang sees calls of the default definition alone
// 32 registers of 64 bytes, and 16 of 32 or 16.
FLASH_SIMD_LEVEL(FLASH_SIMD_64) void multiply_at_level(const GemmCall<float, float>& call) {
  multiply_tile<Registers<float, 64, 4>>(call);
}
FLASH_SIMD_LEVEL(FLASH_SIMD_32) void multiply_at_level(const GemmCall<float, float>& call) {
  multiply_tile<Registers<float, 32, 6>>(call);
}
FLASH_SIMD_LEVEL("default") void multiply_at_level(const GemmCall<float, float>& call) {
  multiply_tile<Registers<float, 16, 6>>(call);
}
FLASH_SIMD_LEVEL(FLASH_SIMD_64) void multiply_at_level(const GemmCall<double, double>& call) {
  multiply_tile<Registers<double, 64, 4>>(call);
}
FLASH_SIMD_LEVEL(FLASH_SIMD_32) void multiply_at_level(const GemmCall<double, double>& call) {
  multiply_tile<Registers<double, 32, 6>>(call);
}
FLASH_SIMD_LEVEL("default") void multiply_at_level(const GemmCall<double, double>& call) {
  multiply_tile<Registers<double, 16, 6>>(call);
}
#pragma GCC diagnostic pop
#else
// aarch64 has 32 registers of 16 bytes.
template <class Real>
void multiply_at_level(const GemmCall<Real, Real>& call) {
  multiply_tile<Registers<Real, 16, 4>>(call);
}
#endif

}  // namespace

void multiply_in_registers(const GemmCall<float, float>& call) {
  assert(call.k <= kMicrokernelTerms);
  multiply_at_level(call);
}
void multiply_in_registers(const GemmCall<double, double>& call) {
  assert(call.k <= kMicrokernelTerms);
  multiply_at_level(call);
}

}  // namespace flash_attn_ext::cpu
