// Materialised P and dS: the first kernel of the two-pass backward on Hopper stores them in tiles, for the GEMMs that
// compute dV and dK from them. This file says how many tiles there are, and where each lies.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/division.h"
#include "attention/host_device.h"
#include "attention/params.h"

namespace flash_attn_ext {

// A tile has kRows queries and as many keys. Only tiles in which something is visible are written and read. A row is a
// tile of queries. The tiles of a row are consecutive, and a row has room for those that it can see. A matrix has the
// rows of a query head: those of one batch entry, or in a packed batch those of all, each of which begins at a row of
// its own. A launch has some matrices, or a query chunk of each: a range of its rows. A chunk may be divided into
// key chunks: ranges of key tiles, each with a launch of its own.
//
// In a tile, a line of 128 bytes holds a query's 64 keys, in 16-byte chunks that are swizzled as the GEMMs read them
// from shared memory: chunk i of query r is at position i ^ (r % 8). In each half of a line the keys are in the order
// in which a thread holds them in an accumulator, so that it writes whole chunks: key 8 j + 2 t + e (j, t < 4, e < 2)
// is at position 8 t + 2 j + e. Above head dim 256 they are in their own order, because dQ is then computed from them.
struct MaterialisedTiles {
  static constexpr int kRows = 64;
  static constexpr int kElements = kRows * kRows;
  static constexpr int64_t kBytes = int64_t{kElements} * 2;
  static constexpr int kStatistics = 3;  // floats for each query that the first kernel reads
  static constexpr int kBlockRows =
      2;  // of a CTA of the first kernel, all of one sequence: a query chunk has whole CTAs

  int width = 0;  // tiles for which a row has room
  int ahead = 0;  // a row has room for row + ahead tiles where that is less than width
  int rows = 0;   // of a matrix
  // Of a launch:
  int first_matrix = 0;
  int chunk_begin = 0;  // rows
  int chunk_end = 0;
  int key_chunk_begin = 0;  // key tiles
  int key_chunk_end = INT32_MAX;
  bool ends_keys = true;  // whether the chunk has no key chunk after this one
  int64_t in_matrix = 0;  // tiles
  int64_t between = 0;    // elements from P to dS

  // Returns the tiles of a launch that has all rows.
  static MaterialisedTiles of(const attention::AttentionParams& p) {
    MaterialisedTiles tiles;
    tiles.width = static_cast<int>(most_keys(p));
    tiles.rows = rows_of_matrix(p);
    tiles.ahead = tiles.width;
    if (p.sequences.cu_seqlens_q == nullptr) {  // all sequences have the same length
      const int64_t after = p.visibility.diagonal(p.sequences.at(0)) + p.visibility.right;
      tiles.ahead = std::min(tiles.width, 1 + (after > 0 ? num_tiles(after) : static_cast<int>(after / kRows)));
    }
    tiles.set_chunk(p, 0, tiles.rows);
    return tiles;
  }

  void set_chunk(const attention::AttentionParams& p, int begin, int end) {
    chunk_begin = begin;
    chunk_end = end;
    // In a packed batch, the second row of a sequence's last CTA may come after the query chunk.
    const int last = std::min(end + (p.sequences.cu_seqlens_q == nullptr ? 0 : kBlockRows - 1), rows);
    in_matrix = std::max<int64_t>(before<int64_t>(last) - before<int64_t>(begin), 1);
  }

  // The key tiles that the launch's rows see, where all sequences have one length and no window hides keys before them.
  int seen_keys() const { return std::clamp(chunk_end - 1 + ahead, 0, width); }

  // A launch of the key chunk [begin, end) of these key tiles. Call it on a query chunk that is not divided yet. The
  // last key chunk also has the key tiles that no row of the chunk sees, since partial dK and dV begin with the first
  // chunk.
  MaterialisedTiles in_key_chunk(const attention::AttentionParams& p, int begin, int end) const {
    MaterialisedTiles key_chunk = *this;
    key_chunk.key_chunk_begin = begin;
    key_chunk.ends_keys = end >= seen_keys();
    if (!key_chunk.ends_keys) key_chunk.key_chunk_end = end;
    key_chunk.width = std::min(end, width) - begin;
    key_chunk.ahead = std::min(ahead - begin, key_chunk.width);
    key_chunk.set_chunk(p, chunk_begin, chunk_end);
    return key_chunk;
  }

  // Chooses the query chunk that ends at row `end` and fits `room`, the tiles for which a matrix has memory. It is
  // empty where not even one CTA's rows fit.
  void choose_chunk(const attention::AttentionParams& p, int end, int64_t room) {
    int begin = end;
    while (begin > 0) {
      const int next = (begin - 1) / kBlockRows * kBlockRows;
      set_chunk(p, next, end);
      if (in_matrix > room) break;
      begin = next;
    }
    set_chunk(p, begin, end);
  }

  FLASH_HOST_DEVICE static int num_tiles(int64_t length) {
    return static_cast<int>(attention::ceil_div(length, kRows));
  }

  static int rows_of_matrix(const attention::AttentionParams& p) {
    if (p.sequences.cu_seqlens_q == nullptr) return num_tiles(p.sequences.max_seqlen_q);
    return static_cast<int>(p.sequences.total_q / kRows + p.batch);
  }

  FLASH_HOST_DEVICE bool begins_keys() const { return key_chunk_begin == 0; }
  FLASH_HOST_DEVICE bool begins_matrix() const { return chunk_begin == 0; }
  FLASH_HOST_DEVICE bool ends_matrix() const { return chunk_end == rows; }

  // The tiles of a sequence's queries that a launch has. first: the sequence's first row.
  FLASH_HOST_DEVICE int begin_of(int first) const { return whole_blocks(chunk_begin - first); }
  FLASH_HOST_DEVICE int end_of(int first) const { return whole_blocks(chunk_end - first); }

  // The matrix's index among those of the launch.
  FLASH_HOST_DEVICE int matrix(const attention::AttentionParams& p, const attention::Sequence& sequence,
                               int key_head) const {
    const int64_t all = p.sequences.cu_seqlens_q != nullptr ? key_head : key_head * p.batch + sequence.batch;
    return static_cast<int>(all) - first_matrix;
  }

  // The rows of the query chunk, in whole CTAs.
  FLASH_HOST_DEVICE int rows_of_chunk() const { return whole_blocks(chunk_end - chunk_begin); }
  // A row's index among those of the launch. row: of the matrix of a query head.
  FLASH_HOST_DEVICE int index_of_row(int head_of_launch, int row) const {
    return head_of_launch * rows_of_chunk() + row - chunk_begin;
  }

  // Where the tiles of a query head would begin if the launch had row 0. The head is head_of_group of pair key_head *
  // batch + batch entry.
  FLASH_HOST_DEVICE int first_of_head(const attention::AttentionParams& p, const attention::Sequence& sequence,
                                      int key_head, int head_of_group) const {
    const int64_t head = matrix(p, sequence, key_head) * p.queries_per_key_head() + head_of_group;
    return static_cast<int>(head * in_matrix) - before(chunk_begin);
  }

  // The first row of a sequence.
  FLASH_HOST_DEVICE static int first_row(const attention::AttentionParams& p, const attention::Sequence& sequence) {
    if (p.sequences.cu_seqlens_q == nullptr) return 0;
    return static_cast<int>(sequence.query_begin / kRows + sequence.batch);
  }

  // The tiles of a head before those of a row. The first rows see nothing, each of the next ones sees one tile more
  // than the row before it, and the rest have `width` tiles.
  template <class Index = int>
  FLASH_HOST_DEVICE Index before(int row) const {
    const Index empty = clamped(-ahead, 0, row);
    const Index growing_end = clamped(width - ahead, static_cast<int>(empty), row);
    return (growing_end - empty) * (empty + growing_end - 1 + 2 * ahead) / 2 + (row - growing_end) * width;
  }

  // Where a tile lies, in elements.
  FLASH_HOST_DEVICE static int64_t offset(int tile) { return int64_t{tile} * kElements; }

 private:
  FLASH_HOST_DEVICE static int whole_blocks(int row) {
    return row > 0 ? attention::ceil_div(row, kBlockRows) * kBlockRows : 0;
  }

  // The most key tiles that a row sees.
  static int64_t most_keys(const attention::AttentionParams& p) {
    const int64_t seen = p.visibility.left + p.visibility.right + kRows;
    return std::min<int64_t>(num_tiles(p.sequences.max_seqlen_k), (seen + kRows - 2) / kRows + 1);
  }
  FLASH_HOST_DEVICE static int clamped(int x, int low, int high) { return x < low ? low : x < high ? x : high; }
};

// Calls act(launch) for each key chunk of a query chunk, in ascending order. key_chunk_tiles: 0 where the chunk is one
// launch.
template <class Act>
void for_each_key_chunk(const attention::AttentionParams& p, const MaterialisedTiles& chunk, int key_chunk_tiles,
                        Act&& act) {
  if (key_chunk_tiles == 0) return act(chunk);
  const int end = std::max(chunk.seen_keys(), 1);
  for (int begin = 0; begin < end; begin += key_chunk_tiles) act(chunk.in_key_chunk(p, begin, begin + key_chunk_tiles));
}

}  // namespace flash_attn_ext
