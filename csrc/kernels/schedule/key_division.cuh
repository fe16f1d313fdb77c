// Which tiles of keys a block works on where keys are divided among blocks.
//
// All tiles of keys that the items of a call see stand in one line, item after item. Every block takes as many of them,
// within one, as every other: whatever lengths are, no multiprocessor waits for another. A block's stretch may end one
// item, hold several whole ones and begin another. The line follows from lengths, shapes and the number of blocks
// alone, so results repeat bitwise.
#pragma once

#include <cstdint>

#include "kernels/schedule/item_parts.h"
#include "kernels/schedule/row_tiles.cuh"
#include "kernels/schedule/tile_range.cuh"
#include "tile/accumulator.h"

namespace flash_attn_ext {

// What an entry sees.
struct EntryKeys {
  attention::Sequence sequence;
  uint32_t first_row;
  int num_rows;
  TileRange tiles;

  // An entry that has rows has a tile, if only to write that they see nothing.
  FLASH_HOST_DEVICE uint32_t count() const {
    const int seen = tiles.end - tiles.begin;
    return num_rows == 0 ? 0 : seen > 1 ? seen : 1;
  }
};

template <int kKeys>
FLASH_HOST_DEVICE EntryKeys keys_of_entry(const attention::AttentionParams& p, const RowTiles& tiles, uint32_t index) {
  const RowTiles::Entry entry = tiles.entry(index);
  EntryKeys keys = {p.sequence_of(entry.batch), entry.first_row, 0, {}};
  keys.num_rows = tiles.count(entry, keys.sequence);
  if (keys.num_rows == 0) return keys;
  if (p.visibility.unlimited()) {
    const attention::Interval all = {0, keys.sequence.num_keys};
    keys.tiles = tile_range<kKeys, uint32_t>(all, all);
    return keys;
  }
  const uint32_t first = tiles.group.quotient(entry.first_row);
  const uint32_t last = tiles.group.quotient(entry.first_row + keys.num_rows - 1);
  keys.tiles = tile_range<kKeys, uint32_t>(p.visibility.keys_of<int>(first, keys.sequence),
                                           p.visibility.keys_of<int>(last, keys.sequence));
  return keys;
}

// What the host knows of the line where all entries see the same tiles: blocks then need not look for their own.
struct KnownLine {
  Divisor tiles_of_item;  // 0: the host knows nothing
  LineShares shares;
  TileRange seen;
  int num_rows;

  FLASH_HOST_DEVICE bool present() const { return tiles_of_item.divisor != 0; }
};

struct KeyDivision {
  RowTiles tiles;
  uint32_t entries;      // batch entries * tiles
  uint32_t blocks;       // that the launch has
  uint32_t least_tiles;  // of keys, that are worth a block
  bool uniform;          // all batch entries see the same tiles
  KnownLine known;       // they do, and have one tile of rows each
};

// A block's stretch of the line. All warps compute the same. Numbers of tiles fit 32 bits (plan/split_forward.cpp).
//
// Code is short on purpose: a block's first instructions come from memory, and take longer than to execute.
template <int kKeys>
struct KeyStretch {
  const attention::AttentionParams& p;
  const KeyDivision& division;
  LineShares shares = {};
  uint32_t at = 0;  // the next tile
  uint32_t end = 0;
  uint32_t entry = 0;        // of that tile
  uint32_t entry_begin = 0;  // its first tile
  EntryKeys keys;

  __device__ __forceinline__ uint32_t items_of_entry() const { return division.tiles.items_of_entry.divisor; }

  __device__ __forceinline__ KeyStretch(const attention::AttentionParams& p, const KeyDivision& division)
      : p(p), division(division) {
    if (division.known.present()) {
      shares = division.known.shares;
      take_share();
      return;
    }
    const uint32_t scanned = division.uniform ? division.tiles.tiles.divisor : division.entries;
    const uint32_t repeated = division.uniform ? division.tiles.tiles.quotient(division.entries) : 1;
    // First all tiles are counted, then the entry of the block's first one is found.
    uint32_t target = UINT32_MAX;
    uint32_t repetition = 0;
#pragma unroll 1
    for (int walk = 0; walk < 2; ++walk) {
      const uint32_t of_scanned = scan(scanned, target);
      if (walk == 1) break;
      const uint32_t line = of_scanned * repeated * items_of_entry();
      if (line == 0) return;
      shares = LineShares::of(line, division.blocks, division.least_tiles);
      take_share();
      target = division.tiles.items_of_entry.quotient(at);
      repetition = target / of_scanned;
      target -= repetition * of_scanned;
      entry_begin = repetition * of_scanned * items_of_entry();
    }
    entry += repetition * division.tiles.tiles.divisor;
  }

  // Goes on to the entry of the next tile, where it is another one. False at the stretch's end.
  __device__ __forceinline__ bool enter() {
    if (at >= end) return false;
    if (division.known.present()) {
      const KnownLine& known = division.known;
      entry = division.tiles.items_of_entry.quotient(known.tiles_of_item.quotient(at));
      entry_begin = entry * known.tiles_of_item.divisor * items_of_entry();
      keys = {{entry, 0, 0, p.sequences.max_seqlen_q, p.sequences.max_seqlen_k}, 0, known.num_rows, known.seen};
      return true;
    }
    uint32_t entered = entry;
#pragma unroll 1
    while (true) {
      keys = keys_of_entry<kKeys>(p, division.tiles, entered);
      const uint32_t tiles = items_of_entry() * keys.count();
      if (at < entry_begin + tiles) break;
      entry_begin += tiles;
      ++entered;
    }
    entry = entered;
    return true;
  }

  // Of the next tile's item in its entry, which has `count` tiles.
  __device__ __forceinline__ uint32_t item_in_entry(uint32_t count) const {
    const uint32_t in_entry = at - entry_begin;
    return division.known.present() ? division.known.tiles_of_item.quotient(in_entry) : in_entry / count;
  }

 private:
  // Nothing, for blocks beyond those that the line is worth.
  __device__ __forceinline__ void take_share() {
    if (blockIdx.x >= shares.blocks) return;
    at = shares.begin_of(blockIdx.x);
    end = shares.begin_of(blockIdx.x + 1);
  }

  // Of one head's tiles in the first entries: how many there are, or the entry that holds tile `target` of them, with
  // its first one added to entry_begin.
  __device__ __forceinline__ uint32_t scan(uint32_t scanned, uint32_t target) {
    uint32_t before = 0;
#pragma unroll 1
    for (uint32_t first = 0; first < scanned; first += tile::kWarpSize) {
      const uint32_t index = first + tile::lane();
      const uint32_t own = index < scanned ? keys_of_entry<kKeys>(p, division.tiles, index).count() : 0;
      uint32_t sum = own;  // of this lane's entry and those before it
#pragma unroll 1
      for (int step = 1; step < tile::kWarpSize; step *= 2) {
        const uint32_t lower = __shfl_up_sync(0xFFFFFFFFu, sum, step);
        if (tile::lane() >= step) sum += lower;
      }
      const uint32_t past = __ballot_sync(0xFFFFFFFFu, before + sum > target);
      if (past != 0) {
        const int lane = __ffs(past) - 1;
        entry = first + lane;
        entry_begin += (before + __shfl_sync(0xFFFFFFFFu, sum - own, lane)) * items_of_entry();
        break;
      }
      before += __shfl_sync(0xFFFFFFFFu, sum, tile::kWarpSize - 1);
    }
    return before;
  }
};

}  // namespace flash_attn_ext
