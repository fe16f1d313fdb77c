// The tile sizes of the CPU backend, with their reasons.
#pragma once

#include <cstdint>

namespace flash_attn_ext::cpu {

// The queries of a score tile. In the forward pass a work tile owns them. They are as few as keep the microkernel at
// its full rate, because a causal diagonal or a narrow window computes and wastes about this many columns.
inline constexpr int64_t kStationaryRows = 64;

// The keys of a score tile. In the backward pass a work tile owns them. Two float32 tiles of 64 x 256 are 128 KiB, so
// that they and their operands stay in an L2 of 1 MiB. Operands are packed in tiles of as many rows.
inline constexpr int64_t kStreamedRows = 256;

// Key tiles are clipped to the visible range in steps of this many rows, the length of a vector. A step is small enough
// for narrow windows and few keys, and large enough that oneDNN sees few distinct shapes of bfloat16, for each of which
// it generates code.
inline constexpr int64_t kClipRows = 16;

// Up to this many keys in all are read in place, by dot products: the microkernel would compute kClipRows columns.
inline constexpr int64_t kFewKeys = 8;

// Memory for the converted and transposed operands of one group of heads, and for its dQ or the partial O of its
// splits.
inline constexpr int64_t kPackedBytes = int64_t{32} << 20;

// With few queries, threads split the keys. A split has as many keys as make its additional work small beside reading
// them: its O, m and l are written and read once more.
inline constexpr int64_t kKeysPerSplit = 2048;
static_assert(kKeysPerSplit % kStreamedRows == 0);

}  // namespace flash_attn_ext::cpu
