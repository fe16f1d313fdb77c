// Block diagonals of the scores, for the gradient of a relative-position bias.
#pragma once

#include <cstdint>

#include "attention/division.h"
#include "attention/params.h"

namespace flash_attn_ext {

// The scores of a head are divided into blocks of tile x tile. All blocks of a block diagonal have the same 2 tile - 1
// diagonals of scores. Block diagonals are numbered from that of the last query block and the first key block.
struct BlockDiagonals {
  int tile;
  int heads;  // of the bias
  int query_blocks;
  int key_blocks;
  int splits;  // the CTAs that share the batch entries of a block diagonal

  static BlockDiagonals of(const attention::BackwardParams& p, int tile, int64_t splits) {
    const auto blocks = [&](int64_t length) { return static_cast<int>(attention::ceil_div(length, tile)); };
    return {.tile = tile,
            .heads = static_cast<int>(p.dbias.per_head ? p.num_heads_q : 1),
            .query_blocks = blocks(p.sequences.max_seqlen_q),
            .key_blocks = blocks(p.sequences.max_seqlen_k),
            .splits = static_cast<int>(splits)};
  }

  FLASH_HOST_DEVICE int count() const { return query_blocks + key_blocks - 1; }
  // The block diagonal of a rank. Those of many blocks come first, so that short ones fill the last wave.
  FLASH_HOST_DEVICE int at_rank(int rank) const {
    const int middle = (count() - 1) / 2;
    return rank % 2 == 0 ? middle - rank / 2 : middle + (rank + 1) / 2;
  }
  // The query blocks of a block diagonal, and its first key minus its first query.
  FLASH_HOST_DEVICE int first_block(int index) const { return index < query_blocks ? query_blocks - 1 - index : 0; }
  FLASH_HOST_DEVICE int end_block(int index) const {
    const int end = key_blocks + query_blocks - 1 - index;
    return end < query_blocks ? end : query_blocks;
  }
  FLASH_HOST_DEVICE int offset(int index) const { return (index - (query_blocks - 1)) * tile; }

  FLASH_HOST_DEVICE int64_t num_ctas() const { return int64_t{splits} * heads * count(); }
  // The sums of a CTA: one for each diagonal, and one that is not used.
  FLASH_HOST_DEVICE int64_t sums_of_cta() const { return 2 * int64_t{tile}; }
  int64_t bytes() const { return num_ctas() * sums_of_cta() * int64_t{sizeof(float)}; }
};

}  // namespace flash_attn_ext
