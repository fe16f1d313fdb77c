// Warp-wide stores of 8x8 matrices of 16-bit elements to shared memory (compute capability 9.0 and later).
#pragma once

#include <cstdint>

namespace flash_attn_ext::ptx {

// PTX ISA, stmatrix: lane l gives the address of row l % 8 of matrix l / 8, and of each matrix the two neighbouring
// elements (row l / 4, columns 2 (l % 4) and the next).
__device__ __forceinline__ void store_matrix_x4(uint32_t row_address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// The same with each matrix transposed: lane l gives of each matrix (rows 2 (l % 4) and the next, column l / 4).
__device__ __forceinline__ void store_matrix_x4_transposed(uint32_t row_address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

}  // namespace flash_attn_ext::ptx
