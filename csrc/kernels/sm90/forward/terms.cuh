// What a bias and a mask do to a warpgroup's scores, by where they come from. Both kinds look alike to
// score/score_mod.cuh.
#pragma once

#include "kernels/score/staging.cuh"
#include "kernels/sm90/forward/arguments.h"
#include "kernels/sm90/forward/traits.h"

namespace flash_attn_ext::sm90 {

// Mask and BiasMask kernels: the bias in a tile beside K, the mask as bits that a thread reads one tile ahead.
template <class Traits>
struct BoxTerms {
  using Element = typename Traits::Element;
  using Tile = typename Traits::BiasTile;
  using Where = typename Traits::Where;
  static_assert(Traits::kTile.keys == attention::MaskBits::kKeys || !Traits::kHasBits);

  const Tile* bias;  // of the stage at hand
  uint32_t bits[2];  // of the thread's rows and the tile of keys that comes next

  // Reads the mask's bits for a tile of keys, all of them where it hides nothing.
  __device__ __forceinline__ void prepare(const Where& where, bool masked) {
    bits[0] = bits[1] = ~0u;
    if (!masked) return;
    const attention::MaskBits& mask = where.p.score_mod.mask_bits;
    const uint32_t* words = mask.data + where.item.sequence.batch * mask.batch_stride +
                            where.item.head * mask.head_stride + where.key(0, 0) / attention::MaskBits::kKeys * 4 +
                            tile::lane() % 4;
    const int64_t last = where.p.sequences.max_seqlen_q - 1;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      bits[r] = words[min(where.query(Traits::Scores::row(r), 0), last) * mask.query_stride];
    }
  }

  template <bool kAny, class Function>
  __device__ __forceinline__ void for_each_bias(const Where&, Function&& function) const {
    // Pieces of 8 queries x 8 keys: which one the lane addresses, and its row of it.
    const int piece = tile::lane() / 8;
    const int row = tile::warp() % 4 * 16 + piece % 2 * 8 + tile::lane() % 8;
    const uint32_t own = ptx::shared_address(bias) + row * 128 + ((piece / 2) ^ (row & 7)) * 16;
#pragma unroll
    for (int j = 0; j < Traits::Scores::kColumnTiles; j += 2) {
      uint32_t pairs[4];
      ptx::load_matrix_x4(pairs, (own ^ j % 8 * 16) + j / 8 * Tile::kChunkBytes);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        function(n % 2, j + n / 2, ptx::to_float(static_cast<uint16_t>(pairs[n]), Element{}),
                 ptx::to_float(static_cast<uint16_t>(pairs[n] >> 16), Element{}));
      }
    }
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
};

// Extended kernels: each warp copies its rows of both to shared memory one tile ahead, whatever their strides.
template <class Traits>
struct StagedTerms {
  using Where = typename Traits::Where;

  typename Traits::Staged& own;

  __device__ __forceinline__ void prepare(const Where& where, bool masked) {
    __syncwarp();  // what was there has no readers any more
    stage(own, where, masked);
    ptx::commit_copies();
  }

  __device__ __forceinline__ void await() const {
    ptx::wait_copies<0>();
    __syncwarp();
  }

  template <bool kAny, class Function>
  __device__ __forceinline__ void for_each_bias(const Where& where, Function&& function) const {
    own.template for_each_bias<kAny>(where, function);
  }
  template <class Function>
  __device__ __forceinline__ void for_each_masked(Function&& function) const {
    own.for_each_masked(function);
  }
};

}  // namespace flash_attn_ext::sm90
