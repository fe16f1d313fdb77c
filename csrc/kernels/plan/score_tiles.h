// Tiles of P and dS that the dQ kernel on Hopper stores for the products that make dV and dK of them: how many there
// are, and where each lies.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/host_device.h"
#include "attention/params.h"

namespace flash_attn_ext {

// A tile has kRows queries and as many keys. Only tiles in which something is visible are written and read: those of a
// row, which is a tile of queries, lie one behind the other, and rows have room for what they can see. A matrix has the
// rows of a query head: of one batch entry, or in a packed batch of all, each of which begins at a row of its own. A
// launch has some matrices, or a band of the rows of each.
//
// In a tile a row holds a query's 64 keys, in 16-byte pieces that are swizzled as the products read them from shared
// memory: piece i of row r is at place i ^ (r % 8). In each half of a row the keys are in the order in which a thread
// of an accumulator holds them, so that it writes whole pieces: key 8 j + 2 t + e (j, t < 4, e < 2) at place
// 8 t + 2 j + e.
struct ScoreTiles {
  static constexpr int kRows = 64;
  static constexpr int kElements = kRows * kRows;
  static constexpr int64_t kBytes = int64_t{kElements} * 2;
  static constexpr int kStatistics = 3;  // floats that the dQ kernel reads of a query
  static constexpr int kBlockRows = 2;   // of a block of the dQ kernel, of one sequence: a band has whole ones

  int width = 0;  // tiles for which a row has room
  int ahead = 0;  // or row + ahead, where that is less
  int rows = 0;   // of a matrix
  // Of a launch:
  int first_matrix = 0;
  int band_begin = 0;  // rows
  int band_end = 0;
  int64_t in_matrix = 0;  // tiles
  int64_t between = 0;    // elements from P to dS

  // Of a launch with all rows.
  static ScoreTiles of(const attention::AttentionParams& p) {
    ScoreTiles tiles;
    tiles.width = static_cast<int>(most_keys(p));
    tiles.rows = rows_of_matrix(p);
    tiles.ahead = tiles.width;
    if (p.sequences.cu_seqlens_q == nullptr) {  // where all sequences are as long
      const int64_t after = p.visibility.diagonal(p.sequences.at(0)) + p.visibility.right;
      tiles.ahead = std::min(tiles.width, 1 + (after > 0 ? num_tiles(after) : static_cast<int>(after / kRows)));
    }
    tiles.set_band(p, 0, tiles.rows);
    return tiles;
  }

  void set_band(const attention::AttentionParams& p, int begin, int end) {
    band_begin = begin;
    band_end = end;
    // A sequence of a packed batch may have the second row of its last block behind the band.
    const int last = std::min(end + (p.sequences.cu_seqlens_q == nullptr ? 0 : kBlockRows - 1), rows);
    in_matrix = std::max<int64_t>(before<int64_t>(last) - before<int64_t>(begin), 1);
  }

  // The band before row `end` for which a matrix has room, in tiles. It is empty where no block's rows do.
  void take_band(const attention::AttentionParams& p, int end, int64_t room) {
    int begin = end;
    while (begin > 0) {
      const int next = (begin - 1) / kBlockRows * kBlockRows;
      set_band(p, next, end);
      if (in_matrix > room) break;
      begin = next;
    }
    set_band(p, begin, end);
  }

  FLASH_HOST_DEVICE static int num_tiles(int64_t length) { return static_cast<int>((length + kRows - 1) / kRows); }

  static int rows_of_matrix(const attention::AttentionParams& p) {
    if (p.sequences.cu_seqlens_q == nullptr) return num_tiles(p.sequences.max_seqlen_q);
    return static_cast<int>(p.sequences.total_q / kRows + p.batch);
  }

  FLASH_HOST_DEVICE bool begins_matrix() const { return band_begin == 0; }
  FLASH_HOST_DEVICE bool ends_matrix() const { return band_end == rows; }

  // The tiles of a sequence's queries that a launch has; first: the sequence's first row.
  FLASH_HOST_DEVICE int begin_of(int first) const { return whole_blocks(band_begin - first); }
  FLASH_HOST_DEVICE int end_of(int first) const { return whole_blocks(band_end - first); }

  // Of those that a launch has.
  FLASH_HOST_DEVICE int matrix(const attention::AttentionParams& p, const attention::Sequence& sequence,
                               int key_head) const {
    const int64_t all = p.sequences.cu_seqlens_q != nullptr ? key_head : key_head * p.batch + sequence.batch;
    return static_cast<int>(all) - first_matrix;
  }

  // Where the tiles of a query head would begin, had a launch those of row 0: head_of_group of pair key_head * batch +
  // batch entry.
  FLASH_HOST_DEVICE int first_of_head(const attention::AttentionParams& p, const attention::Sequence& sequence,
                                      int key_head, int head_of_group) const {
    const int64_t head = matrix(p, sequence, key_head) * p.queries_per_key_head() + head_of_group;
    return static_cast<int>(head * in_matrix) - before(band_begin);
  }

  // The first row of a sequence.
  FLASH_HOST_DEVICE static int first_row(const attention::AttentionParams& p, const attention::Sequence& sequence) {
    if (p.sequences.cu_seqlens_q == nullptr) return 0;
    return static_cast<int>(sequence.query_begin / kRows + sequence.batch);
  }

  // The tiles of a head before those of a row: the first rows see nothing, each of the next ones sees one tile more
  // than the one before, and the rest have `width`.
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
    return row > 0 ? (row + kBlockRows - 1) / kBlockRows * kBlockRows : 0;
  }

  // As many as a row sees at most.
  static int64_t most_keys(const attention::AttentionParams& p) {
    const int64_t seen = p.visibility.left + p.visibility.right + kRows;
    return std::min<int64_t>(num_tiles(p.sequences.max_seqlen_k), (seen + kRows - 2) / kRows + 1);
  }
  FLASH_HOST_DEVICE static int clamped(int x, int low, int high) { return x < low ? low : x < high ? x : high; }
};

}  // namespace flash_attn_ext
