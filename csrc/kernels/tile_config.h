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

namespace flash_attn_ext::sm80 {

inline constexpr int kWarpSize = 32;

// Head dims are rounded up to one of these; the tail is filled with zeros.
inline constexpr int kHeadDims[] = {64, 96, 128, 192, 256};

// A forward or dQ block: kQueries rows of Q stay, tiles of kKeys stream past. kWarps warps of kQueries / kWarps rows.
struct QueryStationaryTile {
  int queries;
  int keys;
  int warps;
};

// Two blocks share a multiprocessor: 32 rows a warp halve what each product reads from shared memory, as long as O
// (rows x head_dim) and S (rows x keys) fit 255 registers; beyond that, and with the temporaries of an Extended score,
// 16 rows a warp.
constexpr QueryStationaryTile forward_tile(int head_dim, bool extended) {
  if (head_dim <= 64) return {128, extended ? 64 : 128, 4};
  if (head_dim <= 128) return {extended ? 64 : 128, 64, 4};
  return {64, 64, 4};
}

// S and dP are both alive: fewer keys at a time.
constexpr QueryStationaryTile backward_dq_tile(int head_dim) {
  if (head_dim <= 64) return {128, 64, 4};
  if (head_dim <= 128) return {64, 64, 4};
  return {64, 32, 4};
}

// A dK/dV block: `keys` rows of K and V stay, tiles of `queries` rows of Q and dO stream past.
struct KeyStationaryTile {
  int keys;
  int queries;
  int warps;
};

constexpr KeyStationaryTile backward_dkdv_tile(int head_dim, bool extended) {
  if (head_dim <= 64) return {128, 64, 8};
  if (head_dim <= 128) return {64, extended ? 32 : 64, 4};
  return {64, 32, 4};
}

}  // namespace flash_attn_ext::sm80
