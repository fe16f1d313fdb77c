// A bias in tiles and a mask as bits, for score/score_mod.cuh.
#pragma once

#include "kernels/sm90/bias_mask.cuh"
#include "kernels/sm90/forward/traits.h"

namespace flash_attn_ext::sm90 {

// Kernels for a mask, or for a bias and a mask: TMA loads the bias beside K, and a thread reads the mask's bits one
// tile ahead.
template <class Traits>
struct TmaBiasMask {
  using Tile = typename Traits::BiasTile;
  using Where = typename Traits::Where;
  static constexpr int kKeys = Traits::kConfig.block_n;
  static constexpr int kTilesOfWord = static_cast<int>(attention::MaskBits::kKeys) / kKeys;
  static_assert(kTilesOfWord * kKeys == attention::MaskBits::kKeys || !Traits::kHasBits);

  const Tile* bias;          // in the current stage
  const uint32_t* words[2];  // the mask's words for the thread's rows and the first tile of keys
  uint32_t bits[2];          // the mask's bits for the next tile

  // Prepares a work tile and its first tile of keys. The addresses of the words are cached, since computing them takes
  // many instructions.
  __device__ __forceinline__ void start(const Where& where, bool masked) {
    if (masked) find_words(where);
    prepare(static_cast<int>(where.key(0, 0) / kKeys), masked);
  }

  // Reads the mask's bits for a tile of keys; all bits are set where the mask hides nothing.
  __device__ __forceinline__ void prepare(int key_tile, bool masked) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      bits[r] = masked ? words[r][key_tile / kTilesOfWord * 4] >> key_tile % kTilesOfWord * (32 / kTilesOfWord) : ~0u;
    }
  }

  template <bool kAny, class Function>
  __device__ __forceinline__ void for_each_bias(const Where&, Function&& function) const {
    for_each_boxed_bias<typename Traits::Scores>(bias, function);
  }

  template <class Function>
  __device__ __forceinline__ void for_each_masked(Function&& function) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < 2 * Traits::Scores::kColumnTiles; ++i) {
        if ((bits[r] & 1u << i) == 0) function(r, i / 2, i % 2);
      }
    }
  }

 private:
  __device__ __forceinline__ void find_words(const Where& where) {
    const attention::MaskBits& mask = where.p.score_mod.mask_bits;
    const uint32_t* const first = mask.data + where.item.sequence.batch * mask.batch_stride +
                                  where.item.head * mask.head_stride + tile::lane() % 4;
    const int64_t last = where.p.sequences.max_seqlen_q - 1;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      words[r] = first + min(where.query(Traits::Scores::row(r), 0), last) * mask.query_stride;
    }
  }
};

}  // namespace flash_attn_ext::sm90
