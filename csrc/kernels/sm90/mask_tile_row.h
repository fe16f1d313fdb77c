// Flags of a mask for 64 queries: a byte for each tile of 64 keys.
#pragma once

#include "attention/score_mod.h"

namespace flash_attn_ext::sm90 {

// A row of the bytes of a mask's tiles (attention::MaskTiles).
struct MaskTileRow {
  const uint8_t* data;  // null: nothing is masked
  int64_t key_stride;

  __device__ __forceinline__ static MaskTileRow of(const attention::MaskTiles& tiles, int batch, int head,
                                                   int query_tile) {
    if (!tiles.present()) return {nullptr, 0};
    return {tiles.data + batch * tiles.batch_stride + head * tiles.head_stride + query_tile * tiles.query_stride,
            tiles.key_stride};
  }
  __device__ __forceinline__ uint32_t flags(int key_tile) const {
    return data == nullptr ? attention::MaskTiles::kSomeTrue : data[key_tile * key_stride];
  }
};

}  // namespace flash_attn_ext::sm90
