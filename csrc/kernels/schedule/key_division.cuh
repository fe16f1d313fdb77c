// Which tiles of keys a block works on where keys are divided among blocks.
//
// All tiles of keys that the items of a call see stand in one line, item after item. Every block takes as many of them,
// within one, as every other: whatever lengths are, no multiprocessor waits for another. A block's stretch may end one
// item, hold several whole ones and begin another. The line follows from lengths, shapes and the number of blocks
// alone, so results repeat bitwise.
#pragma once

#include <cstdint>

#include "kernels/schedule/row_tiles.cuh"
#include "kernels/schedule/tile_range.cuh"
#include "tile/accumulator.h"

namespace flash_attn_ext {

// The parts of an item: the memory that each part's block leaves its O and softmax states in has a number, its slot.
struct ItemParts {
  int first;   // slot of the first part
  int second;  // of the second one; the others follow with a step that the kernel knows
  int count;   // 1: the item is finished; kHasNan: it is, and a NaN came out

  static constexpr int kHasNan = 0;

  __device__ __forceinline__ int slot(int part, int step) const {
    return part == 0 ? first : second + (part - 1) * step;
  }
};

// Of two, since a block leaves at most two items unfinished: the one that it begins with and the one that it ends with.
inline constexpr int kSlotsPerBlock = 2;

struct KeyDivision {
  RowTiles tiles;
  uint32_t entries;         // batch entries * tiles
  uint32_t blocks;          // that the launch has
  uint32_t least_tiles;     // of keys, that are worth a block
  bool uniform;             // all batch entries see the same tiles
  uint32_t tiles_of_entry;  // of keys, for one head, where all entries see as many; 0: blocks count them
};

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

// A block's stretch of the line. All warps compute the same. Numbers of tiles fit 32 bits (plan/split_forward.cpp).
//
// Code is short on purpose: a block's first instructions come from memory, and take longer than to execute.
template <int kKeys>
struct KeyStretch {
  const attention::AttentionParams& p;
  const KeyDivision& division;
  uint32_t share = 0;     // tiles of a block; the first ones have one more
  uint32_t one_more = 0;  // how many
  uint32_t at = 0;        // the next tile
  uint32_t end = 0;
  uint32_t entry = 0;        // of that tile
  uint32_t entry_begin = 0;  // its first tile
  EntryKeys keys;

  __device__ __forceinline__ uint32_t items_of_entry() const { return division.tiles.items_of_entry.divisor; }
  __device__ __forceinline__ uint32_t begin_of(uint32_t block) const { return block * share + min(block, one_more); }
  __device__ __forceinline__ uint32_t block_of(uint32_t tile) const {
    const uint32_t of_more = one_more * (share + 1);
    return tile < of_more ? tile / (share + 1) : one_more + (tile - of_more) / share;
  }

  __device__ __forceinline__ KeyStretch(const attention::AttentionParams& p, const KeyDivision& division)
      : p(p), division(division) {
    const uint32_t scanned = division.uniform ? division.tiles.tiles.divisor : division.entries;
    const uint32_t repeated = division.uniform ? division.tiles.tiles.quotient(division.entries) : 1;
    // First all tiles are counted, then the entry of the block's first one is found.
    uint32_t target = UINT32_MAX;
    uint32_t repetition = 0;
#pragma unroll 1
    for (int walk = 0; walk < 2; ++walk) {
      const uint32_t of_scanned = division.tiles_of_entry != 0 ? division.tiles_of_entry : scan(scanned, target);
      if (walk == 1) break;
      const uint32_t line = of_scanned * repeated * items_of_entry();
      const uint32_t blocks = min(division.blocks, max(line / division.least_tiles, 1u));
      if (line == 0 || blockIdx.x >= blocks) return;
      share = line / blocks;
      one_more = line - share * blocks;
      at = begin_of(blockIdx.x);
      end = begin_of(blockIdx.x + 1);
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

 private:
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
