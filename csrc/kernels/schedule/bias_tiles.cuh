// How a launch divides the gradient of a bias that has a value for each query and key: it has one CTA per tile of
// dBias, which sums dS of the query heads that share the tile.
#pragma once

#include "attention/division.h"
#include "kernels/schedule/head_tiles.h"
#include "kernels/schedule/schedule.cuh"

namespace flash_attn_ext {

// Maps a CTA's index to (batch entry and head of the bias, tile). The host prepares the divisions, as in Schedule.
struct BiasTiles {
  static constexpr int kTile = 64;  // queries, and keys
  static constexpr int kChunk = 8;  // elements in 16 bytes

  uint32_t num_blocks;
  uint32_t first_pair;
  uint32_t end_pair;
  uint32_t group;       // query heads of a KV group
  uint32_t first_head;  // the first head of the bias that the launch's pairs belong to
  Divisor heads;        // how many heads of the bias they belong to
  Divisor batch;
  Divisor rows;     // tiles in a column of a materialised dS matrix
  Divisor columns;  // tiles in a row of it
  bool in_chunks;   // rows of dBias consist of whole chunks of kChunk elements: 16 bytes, or 32 in float32

  // Neighbouring CTAs get neighbouring columns of the materialised rows.
  struct Place {
    uint32_t batch;  // of the bias; 0 where it is broadcast
    uint32_t head;   // of the bias; 0 where it is broadcast
    uint32_t row;
    uint32_t column;
  };
  __device__ __forceinline__ Place place(uint32_t block) const {
    const uint32_t row_and_matrix = columns.quotient(block);
    const uint32_t matrix = rows.quotient(row_and_matrix);
    const uint32_t batch_entry = heads.quotient(matrix);
    return {.batch = batch_entry,
            .head = first_head + matrix - batch_entry * heads.divisor,
            .row = row_and_matrix - matrix * rows.divisor,
            .column = block - row_and_matrix * columns.divisor};
  }
};

// Describes a launch that computes `pairs`. num_blocks is UINT32_MAX where a grid cannot hold the CTAs.
inline BiasTiles make_bias_tiles(const attention::BackwardParams& p, const Pairs& pairs, bool rows_are_keys) {
  const attention::BiasGradient& g = p.dbias;
  const auto tiles_of = [](int64_t length) { return attention::ceil_div(length, BiasTiles::kTile); };
  const int64_t query_tiles = tiles_of(p.sequences.max_seqlen_q);
  const int64_t key_tiles = tiles_of(p.sequences.max_seqlen_k);
  const int64_t end_pair = pairs.first + pairs.count;
  const int64_t first_key_head = pairs.first / p.batch;
  const int64_t key_heads = attention::ceil_div(end_pair, p.batch) - first_key_head;
  const int64_t group = p.queries_per_key_head();
  const int64_t heads = g.per_head ? key_heads * group : 1;
  const int64_t blocks = (g.per_batch ? p.batch : 1) * heads * query_tiles * key_tiles;
  if (blocks == 0 || blocks > INT32_MAX) return {.num_blocks = blocks == 0 ? 0 : UINT32_MAX};
  const auto whole = [](int64_t elements) { return elements % BiasTiles::kChunk == 0; };
  const auto divisor = [](int64_t n) { return Divisor::of(static_cast<uint32_t>(n)); };
  return {.num_blocks = static_cast<uint32_t>(blocks),
          .first_pair = static_cast<uint32_t>(pairs.first),
          .end_pair = static_cast<uint32_t>(end_pair),
          .group = static_cast<uint32_t>(group),
          .first_head = static_cast<uint32_t>(g.per_head ? first_key_head * group : 0),
          .heads = divisor(heads),
          .batch = divisor(p.batch),
          .rows = divisor(rows_are_keys ? key_tiles : query_tiles),
          .columns = divisor(rows_are_keys ? query_tiles : key_tiles),
          .in_chunks = g.key_stride == 1 && reinterpret_cast<uintptr_t>(g.data) % 16 == 0 && whole(g.query_stride) &&
                       whole(g.head_stride) && whole(g.batch_stride) && whole(p.sequences.max_seqlen_k)};
}

// Iterates over the launch's query heads that share a bias matrix.
struct SharingHeads {
  uint32_t batch;
  uint32_t key_head;
  uint32_t head_of_group;
  uint32_t left;  // how many are still to come

  // bias_batch and bias_head are 0 where the bias is broadcast.
  __device__ __forceinline__ SharingHeads(const BiasTiles& tiles, const attention::BiasGradient& g, uint32_t bias_batch,
                                          uint32_t bias_head) {
    const Divisor& batches = tiles.batch;
    const uint32_t bias_key_head = bias_head / tiles.group;
    uint32_t begin = tiles.first_pair;
    uint32_t end = tiles.end_pair;
    if (g.per_head) {
      begin = max(begin, bias_key_head * batches.divisor);
      end = min(end, (bias_key_head + 1) * batches.divisor);
    }
    key_head = batches.quotient(begin);
    batch = begin - key_head * batches.divisor;
    if (g.per_batch) {
      if (batch > bias_batch) ++key_head;
      batch = bias_batch;
      begin = key_head * batches.divisor + batch;
    }
    uint32_t pairs = begin < end ? end - begin : 0;
    if (g.per_batch) pairs = batches.quotient(pairs + batches.divisor - 1);
    head_of_group = g.per_head ? bias_head - bias_key_head * tiles.group : 0;
    left = g.per_head ? pairs : pairs * tiles.group;
  }

  __device__ __forceinline__ HeadCoord next(const BiasTiles& tiles, const attention::BackwardParams& p) {
    const attention::BiasGradient& g = p.dbias;
    const HeadCoord coord = {p.sequences.at(batch), key_head * tiles.group + head_of_group, key_head};
    --left;
    if (!g.per_head) {
      head_of_group = head_of_group + 1 == tiles.group ? 0 : head_of_group + 1;
      if (head_of_group != 0) return coord;
    }
    if (!g.per_batch) batch = batch + 1 == tiles.batch.divisor ? 0 : batch + 1;
    if (g.per_batch || batch == 0) ++key_head;
    return coord;
  }
};

}  // namespace flash_attn_ext
