// Block index -> what the block computes: (head, tile of rows, slice of columns). Indices fit 32 bits, which divide
// several times faster than 64.
#pragma once

#include "kernels/sm80/score_tile.cuh"
#include "kernels/tile_config.h"

namespace flash_attn_ext::sm80 {

// Heads that are worked on together come tile by tile, all of them at one tile before any is at the next. One head at a
// time keeps what streams past its tiles in L2. Where tiles differ in work (causal attention), as many heads as L2
// holds let a launch end on the least of it.
struct HeadAndTile {
  uint32_t head;
  uint32_t tile;  // in the order of work
};

// Each of the launch's heads has `tiles` tiles, and each tile `slices` blocks; `rows` rows of both operands stream
// past.
template <class Element>
__device__ __forceinline__ HeadAndTile head_and_tile(const attention::AttentionParams& p, uint32_t tiles,
                                                     uint32_t slices, int64_t rows) {
  const uint32_t index = blockIdx.x / slices;
  const bool uneven = (p.visibility.left == attention::Visibility::kUnbounded) !=
                      (p.visibility.right == attention::Visibility::kUnbounded);
  if (!uneven) return {index / tiles, index % tiles};
  // In KiB, for 32 bits.
  constexpr uint32_t kStreamed = 24 << 10;
  const auto of_head = static_cast<uint32_t>(rows * (p.head_dim_qk + p.head_dim_v) * int64_t{sizeof(Element)} >> 10);
  const uint32_t num_heads = gridDim.x / (tiles * slices);
  const uint32_t together = min(max(kStreamed / max(of_head, 1u), 1u), num_heads);
  const uint32_t section = index / (together * tiles);
  const uint32_t in_section = index % (together * tiles);
  const uint32_t heads = min(together, num_heads - section * together);
  return {section * together + in_section % heads, in_section / heads};
}

struct QueryBlock {
  WorkItem item;
  int64_t first_query;
  int first_column;
};

// Tiles with the most keys first. first_head: of the launch, counted batch-major.
template <class Kernel>
__device__ __forceinline__ QueryBlock query_block(const attention::AttentionParams& p, int64_t head_dim,
                                                  int64_t first_head) {
  const auto slices = static_cast<uint32_t>(num_slices(head_dim, Kernel::kTile.columns));
  const auto tiles = static_cast<uint32_t>(num_tiles(p.sequences.max_seqlen_q, Kernel::kTile.queries));
  const auto num_heads = static_cast<uint32_t>(p.num_heads_q);
  const HeadAndTile at = head_and_tile<typename Kernel::Element>(p, tiles, slices, p.sequences.max_seqlen_k);
  const uint32_t head_index = static_cast<uint32_t>(first_head) + at.head;
  const uint32_t head = head_index % num_heads;
  const uint32_t key_head = head / static_cast<uint32_t>(p.queries_per_key_head());
  return {.item = {p.sequences.at(head_index / num_heads), head, key_head},
          .first_query = int64_t{tiles - 1 - at.tile} * Kernel::kTile.queries,
          .first_column = static_cast<int>(blockIdx.x % slices) * Kernel::kTile.columns};
}

struct KeyBlock {
  WorkItem item;  // with the group's first query head
  int64_t first_key;
  int first_column;
};

// Of pairs [p.first_pair, p.first_pair + p.num_pairs).
template <class Kernel>
__device__ __forceinline__ KeyBlock key_block(const attention::BackwardParams& p) {
  const auto slices = static_cast<uint32_t>(num_slices(max(p.head_dim_qk, p.head_dim_v), Kernel::kTile.columns));
  const auto tiles = static_cast<uint32_t>(num_tiles(p.sequences.max_seqlen_k, Kernel::kTile.keys));
  const auto num_heads = static_cast<uint32_t>(p.num_heads_k);
  const HeadAndTile at = head_and_tile<typename Kernel::Element>(p, tiles, slices, p.sequences.max_seqlen_q);
  const uint32_t pair = static_cast<uint32_t>(p.first_pair) + at.head;
  const uint32_t key_head = pair % num_heads;
  return {.item = {p.sequences.at(pair / num_heads), key_head * p.queries_per_key_head(), key_head},
          .first_key = int64_t{at.tile} * Kernel::kTile.keys,
          .first_column = static_cast<int>(blockIdx.x % slices) * Kernel::kTile.columns};
}

}  // namespace flash_attn_ext::sm80
