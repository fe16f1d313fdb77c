// Division of work into shares of about equal size.
#pragma once

#include <algorithm>
#include <cstdint>

namespace flash_attn_ext::attention {

// The size of a share, at least 1, when `count` is divided evenly into the fewest shares of at most `most`.
inline int64_t even_share(int64_t count, int64_t most) {
  const int64_t shares = std::max<int64_t>((count + most - 1) / most, 1);
  return std::max<int64_t>((count + shares - 1) / shares, 1);
}

}  // namespace flash_attn_ext::attention
