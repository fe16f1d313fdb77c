// How a thread of an accumulator writes a tile of P or dS (schedule/materialised_tiles.h): a 16-byte chunk in each
// half of each of its rows.
#pragma once

#include "kernels/epilogue/store_quads.cuh"
#include "kernels/schedule/materialised_tiles.h"
#include "tile/sm90/gemm.h"

namespace flash_attn_ext::sm90 {

struct StoredChunks {
  static constexpr int kElements = 8;
  using Packed = tile::PackedRows<MaterialisedTiles::kRows>;
  using Scores = tile::WarpgroupAccumulator<MaterialisedTiles::kRows>;

  // to: the thread's first chunk of the tile. kInOrder: the keys of each half are in their own order, so that dS may be
  // a left operand in shared memory. The four threads of a row then exchange what they hold. The stores are marked
  // evict-first in L2, so that K and V stay there.
  template <bool kInOrder = false, class Element>
  __device__ __forceinline__ static void store(const Packed& packed, Element* to) {
#pragma unroll
    for (int r = 0; r < Scores::kThreadRows; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t(&low)[4] = packed.a[2 * half];
        const uint32_t(&high)[4] = packed.a[2 * half + 1];
        uint32_t words[4] = {low[r], low[2 + r], high[r], high[2 + r]};
        if constexpr (kInOrder) transpose_quad(words);
        // The halves of a row are 4 chunks apart. The swizzle decides which of them comes first.
        Element* const row = to + Scores::row_step(r) * MaterialisedTiles::kRows;
        Element* const at = half == 0 ? row : other_half(row);
        __stcs(reinterpret_cast<uint4*>(at), uint4{words[0], words[1], words[2], words[3]});
      }
    }
  }

 private:
  template <class Element>
  __device__ __forceinline__ static Element* other_half(Element* at) {
    return reinterpret_cast<Element*>(reinterpret_cast<uintptr_t>(at) ^ 4 * kElements * sizeof(Element));
  }
};

}  // namespace flash_attn_ext::sm90
