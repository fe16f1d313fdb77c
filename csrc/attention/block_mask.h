// The blocks of keys that each block of queries sees. They are a mask in another form: one byte for each pair of
// blocks.
#pragma once

#include <cstdint>

#include "attention/host_device.h"

namespace flash_attn_ext::attention {

// A (batch, heads, query blocks, key blocks) tensor of bool, True = attend. A block has 64 or 128 queries or keys, and
// the last one may have fewer. A broadcast dimension has stride 0; key blocks have stride 1. So the tiles of 64 queries
// x 64 keys that begin at multiples of 64 are seen completely or not at all.
struct BlockMask {
  const uint8_t* data = nullptr;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t query_stride = 0;  // between query blocks
  int query_shift = 6;       // log2 of the queries of a block
  int key_shift = 6;         // log2 of the keys of a block
  int last_query_block = 0;
  int last_key_block = 0;

  FLASH_HOST_DEVICE bool present() const { return data != nullptr; }

  // The flags of a query's block. Tiles may reach past the last block; queries and keys there take its flags.
  FLASH_HOST_DEVICE const uint8_t* row(int64_t batch, int64_t head, int64_t query) const {
    const int block = static_cast<int>(query) >> query_shift;
    return data + batch * batch_stride + head * head_stride +
           (block < last_query_block ? block : last_query_block) * query_stride;
  }

  // Whether the queries of a block see a key. row: as row() returns it, here and below.
  FLASH_HOST_DEVICE bool sees(const uint8_t* row, int64_t key) const {
    const int block = static_cast<int>(key) >> key_shift;
    return row[block < last_key_block ? block : last_key_block] != 0;
  }

  // The bits of `keys` keys from `first` on, a multiple of 64, in the order of MaskBits: the word of any thread of a
  // quad. keys: 64 or 128.
  FLASH_HOST_DEVICE uint32_t quad_word(const uint8_t* row, int first, int keys) const {
    const uint32_t low = sees(row, first) ? 0x0000FFFFu : 0u;
    return keys == 64 ? low : low | (sees(row, first + 64) ? 0xFFFF0000u : 0u);
  }
};

}  // namespace flash_attn_ext::attention
