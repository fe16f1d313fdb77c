// Transposes of blocks in the compute type.
#pragma once

#include "kernels/cpu/gemm/tile_gemm.h"

namespace flash_attn_ext::cpu {

// out (columns x rows) = in^T (in is rows x columns).
void transpose(int64_t rows, int64_t columns, Block<const float> in, Block<float> out);
void transpose(int64_t rows, int64_t columns, Block<const double> in, Block<double> out);

}  // namespace flash_attn_ext::cpu
