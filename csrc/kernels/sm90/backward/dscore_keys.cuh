// A warp's 16 keys of dS of a visit, in shared memory. Until the warp writes it, what it needs for that lies there: the
// draws of dropout, or the bias.
#pragma once

#include <cstdint>

#include "kernels/sm90/backward/traits.h"
#include "ptx/ldmatrix.h"
#include "ptx/shared_memory.h"
#include "ptx/stmatrix.h"

namespace flash_attn_ext::sm90 {

// Rows are queries, of 64 keys in each chunk: 32 bytes of each row are the warp's.
template <class Traits>
struct DscoreKeys {
  using Tile = typename Traits::DscoreTile;
  using Packed = tile::PackedRows<Traits::kQueries>;
  static constexpr int kKeys = 16;
  static constexpr int kWarpsOfChunk = tile::kBoxColumns / kKeys;

  uint32_t chunk;
  int piece;  // the first of its two, of 8 keys each

  // warp: its place among those of the key warpgroups.
  __device__ __forceinline__ DscoreKeys(const Tile& tile, int warp)
      : chunk(ptx::shared_address(tile.data[warp / kWarpsOfChunk])), piece(warp % kWarpsOfChunk * 2) {}

  __device__ __forceinline__ void store(const Packed& dscores) const {
#pragma unroll
    for (int step = 0; step < Packed::kSteps; ++step) {
      ptx::store_matrix_x4_transposed(lane_address(step), dscores.a[step]);
    }
  }

  __device__ __forceinline__ void clear() const {
    constexpr int kRowsAtOnce = tile::kWarpSize / 2;
#pragma unroll
    for (int i = 0; i < Traits::kQueries / kRowsAtOnce; ++i) {
      ptx::store_shared(address(i * kRowsAtOnce + tile::lane() / 2, tile::lane() % 2), uint4{0, 0, 0, 0});
    }
  }

  // The bias of 16 queries, in the order in which dS is stored.
  __device__ __forceinline__ void read(uint32_t (&pairs)[4], int step) const {
    ptx::load_matrix_x4_transposed(pairs, lane_address(step));
  }

  // Of a word for each lane, without conflicts of banks.
  __device__ __forceinline__ uint32_t word_address() const {
    const int lane = tile::lane();
    return address(lane / 8 * 2, lane / 4 % 2) + lane % 4 * static_cast<int>(sizeof(uint32_t));
  }

 private:
  // Of 8 neighbouring keys.
  __device__ __forceinline__ uint32_t address(int query, int half) const {
    return chunk + query * tile::kBoxRowBytes + ((piece + half) ^ query % 8) * 16;
  }
  // As ldmatrix and stmatrix want it: the lane's query of 16, and its half of the keys.
  __device__ __forceinline__ uint32_t lane_address(int step) const {
    const int lane = tile::lane();
    return address(lane / 16 * 8 + lane % 8, lane / 8 % 2) + step * 16 * tile::kBoxRowBytes;
  }
};

}  // namespace flash_attn_ext::sm90
