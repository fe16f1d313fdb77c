// Tiles of P and dS that the dQ kernel on Hopper stores for the products that make dV and dK of them: how many there
// are, and where each lies.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/host_device.h"
#include "attention/params.h"

namespace flash_attn_ext {

// A tile has kRows queries and as many keys. Only tiles in which something is visible are written and read: those of a
// tile of queries lie one behind the other. A matrix has the tiles of a query head: of one batch entry, or in a packed
// batch of all, each of which begins at a tile of its own.
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

  int width = 0;         // tiles of keys for which a tile of queries has room
  int rows = 0;          // tiles of queries of a matrix
  int first_matrix = 0;  // of a launch
  int64_t between = 0;   // elements from P to dS

  FLASH_HOST_DEVICE static int num_tiles(int64_t length) { return static_cast<int>((length + kRows - 1) / kRows); }

  // As many as a tile of queries sees at most.
  static int64_t most_keys(const attention::AttentionParams& p) {
    const int64_t seen = p.visibility.left + p.visibility.right + kRows;
    return std::min<int64_t>(num_tiles(p.sequences.max_seqlen_k), (seen + kRows - 2) / kRows + 1);
  }

  // The first row of tiles of a query head: head_of_group of pair key_head * batch + batch entry.
  FLASH_HOST_DEVICE int64_t first_row(const attention::AttentionParams& p, const attention::Sequence& sequence,
                                      int key_head, int head_of_group) const {
    const bool packed = p.sequences.cu_seqlens_q != nullptr;
    const int64_t matrix = packed ? key_head : key_head * p.batch + sequence.batch;
    const int64_t first = packed ? sequence.query_begin / kRows + sequence.batch : 0;
    return ((matrix - first_matrix) * p.queries_per_key_head() + head_of_group) * rows + first;
  }

  // Where a tile lies, in elements; first_key_tile is the first that its tile of queries sees.
  FLASH_HOST_DEVICE int64_t offset(int64_t row, int key_tile, int first_key_tile) const {
    return (row * width + key_tile - first_key_tile) * kElements;
  }
};

}  // namespace flash_attn_ext
