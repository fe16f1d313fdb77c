// Which strides of a global matrix count as short.
#pragma once

#include <cstdint>

namespace flash_attn_ext::tile {

// From here on, rows of a tile may be further apart than 32 bits count in bytes.
inline constexpr int64_t kLongStride = int64_t{1} << 24;

}  // namespace flash_attn_ext::tile
