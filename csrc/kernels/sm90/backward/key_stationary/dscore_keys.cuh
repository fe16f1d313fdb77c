// A warp's 16 keys of an iteration's dS, in shared memory. Before the warp writes dS there, the memory holds what it
// computes dS from: the draws of dropout, or the bias.
#pragma once

#include <cstdint>

#include "attention/dropout.h"
#include "kernels/sm90/backward/key_stationary/traits.h"
#include "ptx/ldmatrix.h"
#include "ptx/math.h"
#include "ptx/pin.h"
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

  // warp: its index among the warps of the key warpgroups.
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

// The address of the lane's word of draws, for a warp of the key warpgroups.
template <class Traits>
__device__ __forceinline__ uint32_t address_of_draws(const KeyStationaryShared<Traits>& shared, int stage, int warp) {
  if constexpr (Traits::kHasDraws) {
    return ptx::shared_address(&shared.draws[stage][warp][tile::lane()]);
  } else {
    return DscoreKeys<Traits>(shared.dscores[stage], warp).word_address();
  }
}

// Which weights of an iteration dropout keeps (attention/dropout.h): a bit for each score that a thread of the key
// warpgroups holds. The dQ warpgroup draws the bits between its GEMMs, while the key warpgroups compute earlier
// iterations. The bits lie where dS of the iteration will be, unless a bias lies there. A warp of the key warpgroups
// reads those among its own 16 keys before it writes dS there.
//
// Bit 16 h + 8 e + 2 b + r belongs to element e of row r in column tile 2 b + h. A call of Philox draws for both h and
// both r of a block b of 16 queries, and for two warps whose keys are neighbours.
template <class Traits>
struct KeptScores {
  using Scores = typename Traits::Scores;
  static_assert(Scores::kThreadRows * Scores::kColumnTiles * 2 == 32);

  uint32_t bits;

  __device__ __forceinline__ void read(uint32_t address) { bits = ptx::load_shared(address); }

  // Dropped elements become 0. After the shift, the bits of two pairs of elements are the signs of four bytes.
  __device__ __forceinline__ void keep(tile::PackedRows<Traits::kQueries>& packed) const {
#pragma unroll
    for (int pair = 0; pair < 8; ++pair) {
      const uint32_t signs = bits << (7 - pair);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        packed.a[pair / 2][h * 2 + pair % 2] &= ptx::signs_of_bytes(signs, h == 0 ? 0x1100 : 0x3322);
      }
    }
  }

  // Dropped scores are replaced by 0, not multiplied by it, because they may be NaN.
  __device__ __forceinline__ void keep(Scores& scores) const {
    const uint32_t kept = ptx::pin(bits);
    // The loop has the order of the bits: ptxas then moves seven of them into predicates at a time.
#pragma unroll
    for (int bit = 0; bit < 32; ++bit) {
      float& score = scores.at(bit % 2, bit / 2 % 4 * 2 + bit / 16, bit / 8 % 2);
      score = (kept & 1u << bit) != 0 ? score : 0.0f;
    }
  }
};

// The draws of a thread of the dQ warpgroup: the words of its lane in two warps of the key warpgroups.
template <class Traits>
struct DropoutDraws {
  using Dropout = attention::Dropout;

  struct DrawnTile {
    int batch;
    int head;
    int key_tile;
    int query_tile;
  };

  const Dropout& dropout;
  const uint64_t seed;

  // warp: of the dQ warpgroup. words: those of key warps 2 warp and 2 warp + 1.
  __device__ __forceinline__ void draw(uint32_t (&words)[2], const DrawnTile& at, int warp) const {
    static_assert(Traits::kKeys == 4 * Dropout::kBlockKeys && DscoreKeys<Traits>::kKeys * 2 == Dropout::kBlockKeys);
    const auto key_block = static_cast<uint32_t>(at.key_tile * (Traits::kKeys / Dropout::kBlockKeys) + warp);
    const auto key_counter = key_block * 8 + static_cast<uint32_t>(tile::lane() / 4);
    const auto query_counter = static_cast<uint32_t>(at.query_tile * kBlocks * 8 + tile::lane() % 4 * 2);
    words[0] = words[1] = 0;
#pragma unroll
    for (int e = 1; e >= 0; --e) {
      attention::PhiloxCounter draws[kBlocks];
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        draws[b] = Dropout::counter(static_cast<uint32_t>(at.batch), static_cast<uint32_t>(at.head),
                                    query_counter + static_cast<uint32_t>(b * 8 + e), key_counter);
      }
      attention::philox_4x32_7(draws, seed);
#pragma unroll
      for (int n = 2 * kBlocks - 1; n >= 0; --n) {
        append(words[0], draws[n / 2].word[n % 2]);
        append(words[1], draws[n / 2].word[2 + n % 2]);
      }
    }
    // Each step added threshold - 1 to both halves. Together that is (2^32 - 1) (threshold - 1), which this cancels
    // modulo 2^32.
    words[0] += dropout.threshold - 1;
    words[1] += dropout.threshold - 1;
  }

 private:
  static constexpr int kBlocks = Traits::kQueries / Dropout::kBlockQueries;

  // Replaces two draws, one in each half: by threshold where the weight is kept, else by threshold - 1. This takes two
  // instructions for both.
  __device__ __forceinline__ void append(uint32_t& word, uint32_t draws) const {
    const uint32_t kept = dropout.threshold * 0x10001u;
    word = 2 * word + __vmaxu2(__vminu2(draws, kept), kept - 0x10001u);
  }
};

}  // namespace flash_attn_ext::sm90
