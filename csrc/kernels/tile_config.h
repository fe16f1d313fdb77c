// Every tile size in one place, with its reason.
#pragma once

#include <cstdint>

namespace flash_attn_ext::cpu {

// Rows that a work item owns: queries in the forward and dQ kernels, keys in the dK/dV kernel. As few as keep the
// matrix library at its full rate, since a causal diagonal or a narrow window computes about this many columns in vain.
inline constexpr int64_t kStationaryRows = 64;

// Rows that stream past it. Two 64 x 256 float32 tiles are 128 KiB: with their operands they stay in a 1 MiB L2.
inline constexpr int64_t kStreamedRows = 256;

// Streamed tiles are clipped to what is visible in steps of this many rows: small enough for narrow windows, large
// enough that the matrix library sees few distinct shapes (it generates code for each).
inline constexpr int64_t kClipRows = 32;

// Converted and transposed operands of one group of heads may take this much memory at a time.
inline constexpr int64_t kPackedBytes = int64_t{32} << 20;

}  // namespace flash_attn_ext::cpu
