// Lists of the blocks of keys that each block of queries sees, and the block mask that attention::BlockMask views.
#pragma once

#include <cstdint>

namespace flash_attn_ext::common {

// mask[row][b] = whether the first counts[row] entries of indices[row] have block b. Blocks that do not exist are left
// out, and so are entries past the last one that a list has room for. Everything is contiguous.
struct BlockMaskOfLists {
  const void* counts = nullptr;   // (rows,)
  const void* indices = nullptr;  // (rows, most)
  bool in_64_bits = false;        // int64, not int32
  int64_t rows = 0;               // lists
  int64_t most = 0;               // blocks that a list has room for
  int64_t width = 0;              // blocks of keys
  bool* mask = nullptr;           // (rows, width)
};

}  // namespace flash_attn_ext::common
