// A warp's 16 keys of an iteration's dS, in shared memory. Before the warp writes dS there, the memory holds what it
// computes dS from: the draws of dropout, or the bias.
#pragma once

#include <cstdint>

#include "kernels/sm90/backward/key_stationary/traits.h"
#include "ptx/ldmatrix.h"
#include "ptx/shared_memory.h"
#include "ptx/stmatrix.h"

namespace flash_attn_ext::sm90 {

// Rows are queries. Each chunk of a row has 64 keys, of which 32 bytes are the warp's.
template <class Traits>
struct DscoreKeys {
  using Tile = typename Traits::DscoreTile;
  using Packed = tile::PackedRows<Traits::kQueries>;
  static constexpr int kKeys = 16;
  static constexpr int kWarpsOfChunk = tile::kSmemChunkColumns / kKeys;

  uint32_t chunk_address;  // of the chunk that has the warp's keys
  int first_vector;        // the first of its two 16-byte chunks, of 8 keys each

  // warp: its number among the warps of the key warpgroups.
  __device__ __forceinline__ DscoreKeys(const Tile& tile, int warp)
      : chunk_address(ptx::shared_address(tile.data[warp / kWarpsOfChunk])), first_vector(warp % kWarpsOfChunk * 2) {}

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

  // Reads the bias of 16 queries, in the order in which dS is stored.
  __device__ __forceinline__ void read(uint32_t (&pairs)[4], int step) const {
    ptx::load_matrix_x4_transposed(pairs, lane_address(step));
  }

  // The address of a word for each lane, without bank conflicts.
  __device__ __forceinline__ uint32_t word_address() const {
    const int lane = tile::lane();
    return address(lane / 8 * 2, lane / 4 % 2) + lane % 4 * static_cast<int>(sizeof(uint32_t));
  }

 private:
  // The address of 8 neighbouring keys.
  __device__ __forceinline__ uint32_t address(int query, int half) const {
    return chunk_address + query * tile::kSmemRowBytes + ((first_vector + half) ^ query % 8) * 16;
  }
  // The address that the lane passes to ldmatrix and stmatrix: its query of 16, and its half of the keys.
  __device__ __forceinline__ uint32_t lane_address(int step) const {
    const int lane = tile::lane();
    return address(lane / 16 * 8 + lane % 8, lane / 8 % 2) + step * 16 * tile::kSmemRowBytes;
  }
};

}  // namespace flash_attn_ext::sm90
