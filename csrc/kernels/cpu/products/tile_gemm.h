// Products of tiles: c (m x n) = a (m x k) . b (k x n), row-major, on the calling thread.
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

// Rows further apart are copied first: the matrix libraries count bytes within a tile in 32 bits.
inline constexpr int64_t kLargestStride = int64_t{1} << 20;

struct GemmShape {
  int64_t m;
  int64_t n;
  int64_t k;
};

enum class Accumulate { kNo, kYes };

// Few rows or few terms by multiply_few_rows, more by the matrix libraries.
void multiply(const GemmShape& shape, Block<const float> a, Block<const float> b, Block<float> c, Accumulate mode);
void multiply(const GemmShape& shape, Block<const double> a, Block<const double> b, Block<double> c, Accumulate mode);

// c = a . b for bfloat16, given as its bits. b holds two rows of k as one of pairs: element (t, j) is half t % 2 of
// b.row(t / 2)[j]. k is even.
void multiply_pairs(const GemmShape& shape, Block<const uint16_t> a, Block<const float> b, Block<float> c);

// For a thread after its last such product: gives back what it holds of the CPU (the tiles of AMX).
void release_pairs();

// Whether this CPU can do so faster than in float32.
bool can_multiply_pairs();

// c += a . b, leaving out terms whose weight, an element of a, is exactly 0: what is not attended must not reach the
// result, even where the other factor is NaN or infinity. Slower, and used only where it may be; what no NaN
// or infinity reaches has the bits that multiply gives for finite factors there.
template <class Real>
void multiply_nonzero(const GemmShape& shape, Block<const Real> a, Block<const Real> b, Block<Real> c);

}  // namespace flash_attn_ext::cpu
