// Warp-wide loads of 8x8 matrices of 16-bit elements from shared memory. They move rows of 16 bytes, so they also load
// 8x4 matrices of 32-bit elements, unless these are to be transposed.
#pragma once

#include <cstdint>

namespace flash_attn_ext::ptx {

// PTX ISA 9.7.14.5.15 ldmatrix. Lane l gives the address of row l % 8 of matrix l / 8, and receives from each matrix
// the two neighbouring elements (row l / 4, columns 2 (l % 4) and the next).
__device__ __forceinline__ void load_matrix_x4(uint32_t (&r)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row_address));
}

// The same with each matrix transposed: lane l receives (rows 2 (l % 4) and the next, column l / 4).
__device__ __forceinline__ void load_matrix_x4_transposed(uint32_t (&r)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row_address));
}

}  // namespace flash_attn_ext::ptx
