// What a CTA computes, from its index.
#pragma once

#include "attention/division.h"
#include "kernels/schedule/head_tiles.h"
#include "kernels/schedule/schedule.cuh"

namespace flash_attn_ext {

// The first column of the CTA's slice. It is 0 at compile time in kernels whose tile has all columns.
template <class Kernel>
__device__ __forceinline__ int first_column(const Place& at) {
  return Kernel::kTile.columns < Kernel::kHeadDim ? static_cast<int>(at.slice) * Kernel::kTile.columns : 0;
}

struct QueryBlock {
  HeadCoord coord;
  int64_t first_query;
  int first_column;
};

// Query tiles that see the most keys come first.
__device__ __forceinline__ int64_t first_query_of(const Schedule& schedule, const Place& at, int tile_rows) {
  return int64_t{schedule.tiles - 1 - at.tile} * tile_rows;
}

template <class Kernel>
__device__ __forceinline__ QueryBlock query_block(const attention::AttentionParams& p, const Schedule& schedule) {
  const Place at = schedule.place(blockIdx.x);
  return {.coord = {p.sequences.at(at.batch), at.key_head * schedule.group + at.head_of_group, at.key_head},
          .first_query = first_query_of(schedule, at, Kernel::kTile.queries),
          .first_column = first_column<Kernel>(at)};
}

struct KeyBlock {
  HeadCoord coord;  // head is the first query head of the KV group
  int first_key;
  int first_column;
};

// The at.tile-th key tile in longest-first order: tiles that the most queries see come first. It is negative if the
// sequence does not have the tile. Under causality, the further a key is from the end, the more queries see it,
// whatever the sequence's length.
template <int kRows>
__device__ __forceinline__ int key_tile(const Schedule& schedule, const Place& at, int64_t num_keys) {
  const int tiles = attention::ceil_div(static_cast<int>(num_keys), kRows);
  return tiles - static_cast<int>(schedule.tiles) + static_cast<int>(at.tile);
}

// The same for a tile size that is known at run time.
__device__ __forceinline__ int64_t first_key_of(const Schedule& schedule, const Place& at, int tile_rows,
                                                int64_t num_keys) {
  const int tiles = attention::ceil_div(static_cast<int>(num_keys), tile_rows);
  return int64_t{tiles - static_cast<int>(schedule.tiles) + static_cast<int>(at.tile)} * tile_rows;
}

template <class Kernel>
__device__ __forceinline__ KeyBlock key_block(const attention::AttentionParams& p, const Schedule& schedule) {
  const Place at = schedule.place(blockIdx.x);
  const attention::Sequence sequence = p.sequences.at(at.batch);
  const int tile = key_tile<Kernel::kTile.keys>(schedule, at, sequence.num_keys);
  return {.coord = {sequence, at.key_head * schedule.group, at.key_head},
          .first_key = tile * Kernel::kTile.keys,
          .first_column = first_column<Kernel>(at)};
}

}  // namespace flash_attn_ext
