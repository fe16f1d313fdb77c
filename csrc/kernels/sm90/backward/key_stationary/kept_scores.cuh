// Which weights of an iteration dropout keeps (attention/dropout.h): a bit for each score that a thread of the key
// warpgroups holds.
//
// The dQ warpgroup draws the bits between its GEMMs, while the key warpgroups compute earlier iterations. The bits lie
// where dS of the iteration will be. A warp of the key warpgroups reads those among its own 16 keys before it writes dS
// there.
#pragma once

#include <cstdint>

#include "attention/dropout.h"
#include "kernels/sm90/backward/key_stationary/dscore_keys.cuh"
#include "ptx/bytes.h"
#include "ptx/pin.h"
#include "ptx/shared_memory.h"

namespace flash_attn_ext::sm90 {

// Bit 16 h + 8 e + 2 b + r belongs to element e of row r in column tile 2 b + h. A call of Philox draws for both h and
// both r of a block b of 16 queries, and for two warps whose keys are neighbours.
template <class Traits>
struct KeptScores {
  using Scores = typename Traits::Scores;
  static_assert(Scores::kThreadRows * Scores::kColumnTiles * 2 == 32);

  uint32_t bits;

  __device__ __forceinline__ void read(const DscoreKeys<Traits>& own) { bits = ptx::load_shared(own.word_address()); }

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

  struct Iteration {
    int batch;
    int head;
    int key_tile;
    int query_tile;
  };

  const Dropout& dropout;
  const uint64_t seed;

  // warp: of the dQ warpgroup. words: those of key warps 2 warp and 2 warp + 1.
  __device__ __forceinline__ void draw(uint32_t (&words)[2], const Iteration& iteration, int warp) const {
    static_assert(Traits::kKeys == 4 * Dropout::kBlockKeys && DscoreKeys<Traits>::kKeys * 2 == Dropout::kBlockKeys);
    const auto key_block = static_cast<uint32_t>(iteration.key_tile * (Traits::kKeys / Dropout::kBlockKeys) + warp);
    const auto key_counter = key_block * 8 + static_cast<uint32_t>(tile::lane() / 4);
    const auto query_counter = static_cast<uint32_t>(iteration.query_tile * kBlocks * 8 + tile::lane() % 4 * 2);
    words[0] = words[1] = 0;
#pragma unroll
    for (int e = 1; e >= 0; --e) {
      attention::PhiloxCounter draws[kBlocks];
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        draws[b] = Dropout::counter(static_cast<uint32_t>(iteration.batch), static_cast<uint32_t>(iteration.head),
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
