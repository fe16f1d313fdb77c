// Work in parts of about one size.
#pragma once

#include <algorithm>
#include <cstdint>

namespace flash_attn_ext::attention {

// The size of the fewest parts of up to `most` each that make up `count`, as even as they can be; at least 1.
inline int64_t even_share(int64_t count, int64_t most) {
  const int64_t shares = std::max<int64_t>((count + most - 1) / most, 1);
  return std::max<int64_t>((count + shares - 1) / shares, 1);
}

}  // namespace flash_attn_ext::attention
