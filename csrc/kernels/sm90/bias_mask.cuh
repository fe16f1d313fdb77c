// Biases and masks, in forms that the forward and the backward pass share: flags of whole tiles, and values in the
// layout of a warpgroup's scores.
#pragma once

#include "attention/score_mod.h"
#include "kernels/score/staging.cuh"
#include "tile/sm90/smem_tile.h"

namespace flash_attn_ext::sm90 {

// Flags of a mask for 64 queries: a byte for each tile of 64 keys (attention::MaskTiles).
struct MaskTileRow {
  const uint8_t* data;  // null: nothing is masked
  int64_t key_stride;

  __device__ __forceinline__ static MaskTileRow of(const attention::MaskTiles& tiles, int batch, int head,
                                                   int query_tile) {
    if (!tiles.present()) return {nullptr, 0};
    return {tiles.row(batch, head, query_tile), tiles.key_stride};
  }
  __device__ __forceinline__ uint32_t flags(int key_tile) const {
    return data == nullptr ? attention::MaskTiles::kSomeTrue : data[key_tile * key_stride];
  }
};

// Calls function(r, j, low, high) with the thread's pairs of a bias. The bias is a tile of a warpgroup's queries, as
// the TMA writes it.
template <class Scores, class Tile, class Function>
__device__ __forceinline__ void for_each_boxed_bias(const Tile* bias, Function&& function) {
  using Element = typename Tile::Element;
  // The matrices of ldmatrix have 8 queries x 8 keys: which of them the lane addresses, and its row of it.
  const int matrix = tile::lane() / 8;
  const int row = tile::warp() % 4 * 16 + matrix % 2 * 8 + tile::lane() % 8;
  const uint32_t own = ptx::shared_address(bias) + row * tile::kSmemRowBytes + ((matrix / 2) ^ (row & 7)) * 16;
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

// For generic kernels: each warp copies its rows of both to shared memory one tile ahead, whatever their strides are.
template <class Traits>
struct PrefetchedBiasMask {
  using Where = typename Traits::Where;

  typename Traits::Staged& own;

  __device__ __forceinline__ void start(const Where& where, bool masked) { prepare(where, masked); }

  __device__ __forceinline__ void prepare(const Where& where, bool masked) {
    __syncwarp();  // no lane still reads what was there
    stage(own, where, masked, /*may_call=*/false);
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
