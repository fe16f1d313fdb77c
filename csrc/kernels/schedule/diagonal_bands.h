// Bands of the diagonals of the scores, for the gradient of a bias that follows from key - query alone.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/division.h"
#include "attention/params.h"

namespace flash_attn_ext {

// The scores of a head are divided into blocks of tile x tile. The blocks along a diagonal of blocks are a band. All of
// them have the same diagonals of scores, of which there are 2 tile - 1. Bands are numbered from that of the last query
// block and the first key block.
struct DiagonalBands {
  int tile;
  int heads;  // of the bias
  int query_blocks;
  int key_blocks;
  int splits;  // the CTAs that share the batch entries of a band

  FLASH_HOST_DEVICE int count() const { return query_blocks + key_blocks - 1; }
  // Bands of many blocks come first, so that CTAs of few blocks fill the last wave.
  FLASH_HOST_DEVICE int band(int number) const {
    const int middle = (count() - 1) / 2;
    return number % 2 == 0 ? middle - number / 2 : middle + (number + 1) / 2;
  }
  // The query blocks of a band, and its first key minus its first query.
  FLASH_HOST_DEVICE int first_block(int band) const { return band < query_blocks ? query_blocks - 1 - band : 0; }
  FLASH_HOST_DEVICE int end_block(int band) const {
    const int end = key_blocks + query_blocks - 1 - band;
    return end < query_blocks ? end : query_blocks;
  }
  FLASH_HOST_DEVICE int offset(int band) const { return (band - (query_blocks - 1)) * tile; }

  FLASH_HOST_DEVICE int64_t num_ctas() const { return int64_t{splits} * heads * count(); }
  // The sums of a CTA: one for each diagonal, and one that is not used.
  FLASH_HOST_DEVICE int64_t sums_of_cta() const { return 2 * int64_t{tile}; }
  int64_t bytes() const { return num_ctas() * sums_of_cta() * int64_t{sizeof(float)}; }
};

// ctas: about as many as fill the GPU.
inline DiagonalBands diagonal_bands(const attention::BackwardParams& p, int tile, int64_t ctas) {
  const auto blocks = [&](int64_t length) { return static_cast<int>(attention::ceil_div(length, tile)); };
  DiagonalBands bands = {.tile = tile,
                         .heads = static_cast<int>(p.dbias.per_head ? p.num_heads_q : 1),
                         .query_blocks = blocks(p.sequences.max_seqlen_q),
                         .key_blocks = blocks(p.sequences.max_seqlen_k),
                         .splits = 1};
  const int64_t entries = p.batch * (p.dbias.per_head ? 1 : p.num_heads_q);
  bands.splits = static_cast<int>(std::clamp<int64_t>(ctas / bands.num_ctas(), 1, std::max<int64_t>(entries, 1)));
  return bands;
}

}  // namespace flash_attn_ext
