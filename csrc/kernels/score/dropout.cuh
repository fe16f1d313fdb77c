// Which weights of a score tile dropout keeps (attention/dropout.h).
#pragma once

#include "kernels/score/score_tile.cuh"

namespace flash_attn_ext {

// Calls function(r, j, e, kept) for each of the thread's elements. One Philox call draws for 8 of them (4 where rows
// are keys). These lie 8 apart in both directions, so they belong to one thread. The tile's rows and columns begin at
// multiples of 16, so an element's position in a block of draws is known at compile time. Only whether the keys begin
// in the second half of the block is not.
template <class Tile, class Function>
__device__ __forceinline__ void draw_dropout(const Tile& where, uint64_t seed, Function&& function) {
  using attention::Dropout;
  using Acc = typename Tile::Accumulator;
  constexpr bool kQueries = Tile::kRowsAreQueries;
  constexpr int kShared = kQueries ? 4 : 2;  // column tiles that share a call
  constexpr int kJ = kShared < Acc::kColumnTiles ? kShared : Acc::kColumnTiles;
  const Dropout& dropout = where.p.dropout;
  const auto batch = static_cast<uint32_t>(where.coord.sequence.batch);
  const auto head = static_cast<uint32_t>(where.coord.head);
  const auto quad_row = static_cast<uint32_t>(tile::lane() / 4);
  const auto quad_column = static_cast<uint32_t>(tile::lane() % 4 * 2);
  // Key tiles begin at multiples of their length.
  constexpr bool kWholeBlocks = kQueries && Tile::kKeys % Dropout::kBlockKeys == 0;
  const bool second_half = !kWholeBlocks && where.key(0, 0) % Dropout::kBlockKeys != 0;
  const uint32_t first_query_block = Dropout::query_block(where.query(0, 0));
  const uint32_t first_key_block = Dropout::key_block(where.key(0, 0));
#pragma unroll
  for (int i = 0; i < Acc::kRowTiles; ++i) {
#pragma unroll
    for (int first_j = 0; first_j < Acc::kColumnTiles; first_j += kJ) {
      const uint32_t query_block = first_query_block + (kQueries ? i : first_j / 2);
      const uint32_t key_block = first_key_block + (kQueries ? first_j / 4 : (i + second_half) / 2);
      const bool upper = second_half != (!kQueries && i % 2 == 1);
      attention::PhiloxCounter draws[2];  // of neighbouring columns
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        draws[e] = Dropout::counter(batch, head, query_block * 8 + (kQueries ? quad_row : quad_column + e),
                                    key_block * 8 + (kQueries ? quad_column + e : quad_row));
      }
      attention::philox_4x32_7(draws, seed);
#pragma unroll
      for (int n = 0; n < 4 * kJ; ++n) {
        const int e = n % 2;
        const int half = n / 2 % 2;
        const int key_eighth = kQueries ? n / 4 % 4 : half;
        const uint32_t word = draws[e].word[upper ? (key_eighth + 2) % 4 : key_eighth];
        function(2 * i + half, first_j + n / 4, e, dropout.keeps(word, kQueries ? half : n / 4));
      }
    }
  }
}

template <class Tile, class Function>
__device__ __forceinline__ void draw_dropout(const Tile& where, Function&& function) {
  draw_dropout(where, static_cast<uint64_t>(*where.p.dropout.seed), function);
}

// One bit for each of the thread's elements, for later passes over the same tile.
template <class Tile>
struct KeptWeights {
  using Acc = typename Tile::Accumulator;
  static constexpr int kCount = Acc::kThreadRows * Acc::kColumnTiles * 2;

  uint32_t words[(kCount + 31) / 32] = {};

  __device__ __forceinline__ void draw(const Tile& where) { draw(where, static_cast<uint64_t>(*where.p.dropout.seed)); }
  __device__ __forceinline__ void draw(const Tile& where, uint64_t seed) {
    draw_dropout(where, seed, [&](int r, int j, int e, bool kept) {
      words[index(r, j, e) / 32] |= uint32_t{kept} << (index(r, j, e) % 32);
    });
  }

  __device__ __forceinline__ bool has(int r, int j, int e) const {
    return (words[index(r, j, e) / 32] >> (index(r, j, e) % 32) & 1u) != 0;
  }

  // Selects 0 instead of multiplying by it, since a dropped weight may be NaN.
  __device__ __forceinline__ void apply(Acc& weights, float rescale) const {
    for_each_element<Acc>([&](int r, int, int j, int e, int) {
      weights.at(r, j, e) = has(r, j, e) ? weights.at(r, j, e) * rescale : 0.0f;
    });
  }

 private:
  __device__ __forceinline__ static int index(int r, int j, int e) { return (r * Acc::kColumnTiles + j) * 2 + e; }
};

}  // namespace flash_attn_ext
