// Tiles of packed rows (FlashAttention-3's PackGQA): the query heads that share keys are rows of one tile, so that the
// keys are read once for all of them.
//
// A sequence's row query * group + head of the group belongs to that query and head. The index of a work tile counts
// slices of columns fastest, then heads, then tiles of the sequence, then batch entries.
#pragma once

#include <cstdint>

#include "attention/division.h"
#include "attention/host_device.h"
#include "attention/params.h"

namespace flash_attn_ext {

using attention::Divisor;

// The query and the head of a row.
struct PackedRow {
  int query;
  int head;
};

struct RowTiles {
  uint32_t rows;                // of a tile
  Divisor tiles;                // of the longest sequence
  Divisor group;                // query heads that are rows of the same tiles
  Divisor slices;               // of columns; each is a work tile of its own
  Divisor work_tiles_of_entry;  // groups of a batch entry times slices

  struct Entry {
    uint32_t batch;
    uint32_t first_row;
  };
  FLASH_HOST_DEVICE Entry entry(uint32_t index) const {
    const uint32_t batch = tiles.quotient(index);
    return {batch, (index - batch * tiles.divisor) * rows};
  }

  // A work tile, by its index in its entry.
  struct WorkTile {
    uint32_t head;  // the group's index
    uint32_t slice;
  };
  FLASH_HOST_DEVICE WorkTile work_tile(uint32_t in_entry) const {
    const uint32_t head = slices.quotient(in_entry);
    return {head, in_entry - head * slices.divisor};
  }

  // How many rows of the entry's tile exist.
  FLASH_HOST_DEVICE int count(const Entry& entry, const attention::Sequence& sequence) const {
    const int64_t rest = sequence.num_queries * group.divisor - entry.first_row;
    return static_cast<int>(rest < 0 ? 0 : rest < rows ? rest : rows);
  }
  FLASH_HOST_DEVICE PackedRow at(uint32_t row, uint32_t head) const {
    const uint32_t query = group.quotient(row);
    return {static_cast<int>(query), static_cast<int>(head * group.divisor + (row - query * group.divisor))};
  }
};

}  // namespace flash_attn_ext
