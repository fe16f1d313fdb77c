// Biases and masks as a warpgroup's scores meet them, in forms that both passes know.
#pragma once

#include "kernels/score/staging.cuh"
#include "tile/sm90/box_tile.h"

namespace flash_attn_ext::sm90 {

// Calls function(r, j, low, high) with the thread's pairs of a bias, in a tile of a warpgroup's queries as the copy
// engine writes it.
template <class Scores, class Tile, class Function>
__device__ __forceinline__ void for_each_boxed_bias(const Tile* bias, Function&& function) {
  using Element = typename Tile::Element;
  // Pieces of 8 queries x 8 keys: which one the lane addresses, and its row of it.
  const int piece = tile::lane() / 8;
  const int row = tile::warp() % 4 * 16 + piece % 2 * 8 + tile::lane() % 8;
  const uint32_t own = ptx::shared_address(bias) + row * tile::kBoxRowBytes + ((piece / 2) ^ (row & 7)) * 16;
#pragma unroll
  for (int j = 0; j < Scores::kColumnTiles; j += 2) {
    uint32_t pairs[4];
    ptx::load_matrix_x4(pairs, (own ^ j % 8 * 16) + j / 8 * Tile::kChunkBytes);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      function(n % 2, j + n / 2, ptx::to_float(static_cast<uint16_t>(pairs[n]), Element{}),
               ptx::to_float(static_cast<uint16_t>(pairs[n] >> 16), Element{}));
    }
  }
}

// Kernels that know neither.
struct NoTerms {
  __device__ __forceinline__ void await() const {}
  template <bool kAny, class Where, class Function>
  __device__ __forceinline__ void for_each_bias(const Where&, Function&&) const {}
  template <class Function>
  __device__ __forceinline__ void for_each_masked(Function&&) const {}
};

// Extended kernels: each warp copies its rows of both to shared memory one tile ahead, whatever their strides.
template <class Traits>
struct StagedTerms {
  using Where = typename Traits::Where;

  typename Traits::Staged& own;

  __device__ __forceinline__ void start(const Where& where, bool masked) { prepare(where, masked); }

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
