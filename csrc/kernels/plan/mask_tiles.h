// How a boolean mask, or what intervals or blocks hide, is divided into tiles (attention::MaskTiles).
#pragma once

#include "attention/division.h"
#include "attention/params.h"

namespace flash_attn_ext::plan {

// How many tiles a mask has along each dimension; 1 where it is broadcast.
struct MaskTileCounts {
  int64_t batch;
  int64_t heads;
  int64_t queries;
  int64_t keys;
  FLASH_HOST_DEVICE int64_t total() const { return batch * heads * queries * keys; }
};

inline MaskTileCounts count_mask_tiles(const attention::AttentionParams& p) {
  const attention::MaskDimensions differs = p.mask_dimensions();
  const auto tiles_along = [](bool differs, int64_t length) {
    constexpr int64_t kSize = attention::MaskTiles::kSize;
    return differs ? attention::ceil_div(length, kSize) : int64_t{1};
  };
  return {.batch = differs.batch ? p.batch : 1,
          .heads = differs.heads ? p.num_heads_q : 1,
          .queries = tiles_along(differs.queries, p.sequences.max_seqlen_q),
          .keys = tiles_along(differs.keys, p.sequences.max_seqlen_k)};
}

// Whether the rows of tiles of packed sequences follow each other, so that they take no more memory than one sequence
// of all tokens. A mask has the longest sequence's rows for each one anyway.
inline bool packs_mask_tiles(const attention::AttentionParams& p) {
  return p.score_mod.intervals.present() && p.sequences.cu_seqlens_q != nullptr;
}

// A packed sequence begins at a row of its own.
inline int64_t rows_of_packed_tiles(const attention::AttentionParams& p) {
  return p.sequences.total_q / attention::MaskTiles::kSize + p.batch;
}

inline int64_t mask_tiles_bytes(const attention::AttentionParams& p) {
  const MaskTileCounts counts = count_mask_tiles(p);
  return packs_mask_tiles(p) ? counts.heads * rows_of_packed_tiles(p) * counts.keys : counts.total();
}

// The table of the tiles of a mask, intervals or blocks, in memory of mask_tiles_bytes(p).
inline attention::MaskTiles mask_tiles_in(uint8_t* memory, const attention::AttentionParams& p) {
  const MaskTileCounts counts = count_mask_tiles(p);
  if (packs_mask_tiles(p)) {
    return {.data = memory,
            .head_stride = counts.heads == 1 ? 0 : rows_of_packed_tiles(p) * counts.keys,
            .query_stride = counts.keys,
            .key_stride = 1,
            .first_queries = p.sequences.cu_seqlens_q,
            .num_queries = p.sequences.total_q};
  }
  const auto stride = [](int64_t count, int64_t stride) { return count == 1 ? 0 : stride; };
  return {.data = memory,
          .batch_stride = stride(counts.batch, counts.heads * counts.queries * counts.keys),
          .head_stride = stride(counts.heads, counts.queries * counts.keys),
          .query_stride = stride(counts.queries, counts.keys),
          .key_stride = stride(counts.keys, 1)};
}

// The packed bits of a mask, in memory of mask_bits_bytes(p). They have the same batch entries and heads as the tiles.
inline attention::MaskBits mask_bits_in(void* memory, const attention::AttentionParams& p) {
  constexpr int64_t kKeys = attention::MaskBits::kKeys;
  const MaskTileCounts counts = count_mask_tiles(p);
  const int64_t row = (attention::ceil_div(p.sequences.max_seqlen_k, kKeys) + 1) * 4;
  const int64_t rows = p.mask_dimensions().queries ? p.sequences.max_seqlen_q : 1;
  return {.data = static_cast<uint32_t*>(memory),
          .batch_stride = counts.batch == 1 ? 0 : counts.heads * rows * row,
          .head_stride = counts.heads == 1 ? 0 : rows * row,
          .query_stride = rows == 1 ? 0 : row,
          .words = counts.batch * counts.heads * rows * row};
}
inline int64_t mask_bits_bytes(const attention::AttentionParams& p) { return mask_bits_in(nullptr, p).words * 4; }

}  // namespace flash_attn_ext::plan
