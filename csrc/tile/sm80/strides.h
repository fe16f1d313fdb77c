// Which strides of a global matrix count as short.
#pragma once

#include <cstdint>

namespace flash_attn_ext::tile {

// From this stride on, the distance of two rows of a tile in bytes may exceed 32 bits.
inline constexpr int64_t kLongStride = int64_t{1} << 24;

}  // namespace flash_attn_ext::tile
