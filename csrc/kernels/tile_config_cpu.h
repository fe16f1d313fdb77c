// The tile sizes of the CPU backend, with their reasons.
#pragma once

#include <cstdint>

namespace flash_attn_ext::cpu {

// Queries of a score tile; in the forward pass a work item owns them. As few as keep the matrix library at its full
// rate, since a causal diagonal or a narrow window computes about this many columns in vain.
inline constexpr int64_t kStationaryRows = 64;

// Keys of a score tile; in the backward pass a work item owns them. Two 64 x 256 float32 tiles are 128 KiB: with their
// operands they stay in a 1 MiB L2. Operands are packed in tiles of as many rows.
inline constexpr int64_t kStreamedRows = 256;

// Tiles of keys are clipped to what is visible in steps of this many rows, a vector's: small enough for narrow windows
// and few keys, large enough that the matrix library sees few distinct shapes (it generates code for each).
inline constexpr int64_t kClipRows = 16;

// Up to so many keys in all are read where they lie, by dots: the matrix library would compute kClipRows columns.
inline constexpr int64_t kFewKeys = 8;

// Memory for converted and transposed operands of one group of heads, and for its dQ, or its parts' O.
inline constexpr int64_t kPackedBytes = int64_t{32} << 20;

// Few queries divide their keys among threads. As many keys as make what a part adds (its O, m and l are written and
// read once more) small beside reading them.
inline constexpr int64_t kKeysPerPart = 2048;
static_assert(kKeysPerPart % kStreamedRows == 0);

}  // namespace flash_attn_ext::cpu
