// Our own GEMM of a tile: c (m x n) = a (m x k) . b (k x n), row-major, added to c or not.
#pragma once

#include <cstdint>

#include "kernels/cpu/services.h"

namespace flash_attn_ext::cpu {

// A call has at most this many terms (k). Longer sums are added up from sums of as many, which keeps them exact
// (docs/numerics.md, "Sums on the CPU").
inline constexpr int64_t kMicrokernelTerms = 32;

// An element is the sum of its terms in their order, whatever m and n are; c is added last. So it has the same bits for
// any number of threads, and wherever it lies in a tile.
void multiply_in_registers(const GemmCall<float, float>& call);
void multiply_in_registers(const GemmCall<double, double>& call);

}  // namespace flash_attn_ext::cpu
