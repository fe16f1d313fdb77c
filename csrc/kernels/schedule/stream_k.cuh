// Stream-K scheduling of split-KV: which key tiles a CTA works on.
//
// The key tiles of all work tiles of a call form one work list, work tile after work tile. Each CTA has a range of it,
// and all ranges have the same number of tiles, within one. So no SM waits for another, whatever the lengths are. A
// range may end one work tile, hold several whole ones and begin another. The work list follows from lengths, shapes
// and the number of CTAs only, so results are bitwise reproducible.
#pragma once

#include <cstdint>

#include "kernels/schedule/head_tiles.h"
#include "kernels/schedule/row_tiles.cuh"
#include "kernels/schedule/tile_splits.h"
#include "tile/accumulator.h"

namespace flash_attn_ext {

// An entry is a tile of rows of one batch entry. This is what it sees.
struct EntryKeys {
  attention::Sequence sequence;
  uint32_t first_row;
  int num_rows;
  TileRange tiles;

  // An entry that has rows has a key tile, if only to write that they see nothing.
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

// What the host knows of the work list where all entries see the same key tiles. CTAs then need not search for their
// entries.
struct KnownWorkList {
  Divisor key_tiles_of_work_tile;  // 0: the host knows nothing
  WorkListShares shares;
  TileRange seen;
  int num_rows;

  FLASH_HOST_DEVICE bool present() const { return key_tiles_of_work_tile.divisor != 0; }
};

struct StreamK {
  RowTiles tiles;
  uint32_t entries;      // batch entries * tiles of rows
  uint32_t blocks;       // CTAs of the launch
  uint32_t least_tiles;  // key tiles that are worth a CTA
  bool uniform;          // all batch entries see the same tiles
  KnownWorkList known;   // present where `uniform` holds and each batch entry has one tile of rows
};

// A CTA's range of the work list. All warps compute the same. Numbers of tiles fit 32 bits
// (plan/sm80/split_forward.cpp).
//
// The code is short on purpose: a CTA's first instructions come from memory, which takes longer than to execute them.
template <int kKeys>
struct StreamKRange {
  const attention::AttentionParams& p;
  const StreamK& stream_k;
  WorkListShares shares = {};
  uint32_t at = 0;  // the next tile
  uint32_t end = 0;
  uint32_t entry = 0;        // of that tile
  uint32_t entry_begin = 0;  // the first tile of the entry
  EntryKeys keys;

  __device__ __forceinline__ uint32_t work_tiles_of_entry() const { return stream_k.tiles.work_tiles_of_entry.divisor; }

  __device__ __forceinline__ StreamKRange(const attention::AttentionParams& p, const StreamK& stream_k)
      : p(p), stream_k(stream_k) {
    if (stream_k.known.present()) {
      shares = stream_k.known.shares;
      set_range();
      return;
    }
    const uint32_t scanned = stream_k.uniform ? stream_k.tiles.tiles.divisor : stream_k.entries;
    const uint32_t repeated = stream_k.uniform ? stream_k.tiles.tiles.quotient(stream_k.entries) : 1;
    // The first pass counts all tiles, the second one finds the entry of the range's first tile.
    uint32_t target = UINT32_MAX;
    uint32_t repetition = 0;
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
      const uint32_t of_scanned = scan(scanned, target);
      if (pass == 1) break;
      const uint32_t num_tiles = of_scanned * repeated * work_tiles_of_entry();
      if (num_tiles == 0) return;
      shares = WorkListShares::of(num_tiles, stream_k.blocks, stream_k.least_tiles);
      set_range();
      target = stream_k.tiles.work_tiles_of_entry.quotient(at);
      repetition = target / of_scanned;
      target -= repetition * of_scanned;
      entry_begin = repetition * of_scanned * work_tiles_of_entry();
    }
    entry += repetition * stream_k.tiles.tiles.divisor;
  }

  // Goes on to the entry of the next tile, which may be the same. False at the range's end.
  __device__ __forceinline__ bool enter() {
    if (at >= end) return false;
    if (stream_k.known.present()) {
      const KnownWorkList& known = stream_k.known;
      entry = stream_k.tiles.work_tiles_of_entry.quotient(known.key_tiles_of_work_tile.quotient(at));
      entry_begin = entry * known.key_tiles_of_work_tile.divisor * work_tiles_of_entry();
      keys = {{entry, 0, 0, p.sequences.max_seqlen_q, p.sequences.max_seqlen_k}, 0, known.num_rows, known.seen};
      return true;
    }
    uint32_t entered = entry;
#pragma unroll 1
    while (true) {
      keys = keys_of_entry<kKeys>(p, stream_k.tiles, entered);
      const uint32_t tiles = work_tiles_of_entry() * keys.count();
      if (at < entry_begin + tiles) break;
      entry_begin += tiles;
      ++entered;
    }
    entry = entered;
    return true;
  }

  // The index in its entry of the next tile's work tile, each of whose work tiles has `count` key tiles.
  __device__ __forceinline__ uint32_t work_tile_in_entry(uint32_t count) const {
    const uint32_t in_entry = at - entry_begin;
    return stream_k.known.present() ? stream_k.known.key_tiles_of_work_tile.quotient(in_entry) : in_entry / count;
  }

 private:
  // The range stays empty for CTAs beyond those that the work list is worth.
  __device__ __forceinline__ void set_range() {
    if (blockIdx.x >= shares.blocks) return;
    at = shares.begin_of(blockIdx.x);
    end = shares.begin_of(blockIdx.x + 1);
  }

  // Scans one head's key tiles in the first entries. It returns how many there are. If tile `target` is among them, it
  // sets `entry` to the one that holds the tile, and adds the tiles of all heads before that entry to entry_begin.
  __device__ __forceinline__ uint32_t scan(uint32_t scanned, uint32_t target) {
    uint32_t before = 0;
#pragma unroll 1
    for (uint32_t first = 0; first < scanned; first += tile::kWarpSize) {
      const uint32_t index = first + tile::lane();
      const uint32_t own = index < scanned ? keys_of_entry<kKeys>(p, stream_k.tiles, index).count() : 0;
      uint32_t sum = own;  // of this lane's entry and those of the lanes before it
#pragma unroll 1
      for (int step = 1; step < tile::kWarpSize; step *= 2) {
        const uint32_t lower = __shfl_up_sync(0xFFFFFFFFu, sum, step);
        if (tile::lane() >= step) sum += lower;
      }
      const uint32_t past = __ballot_sync(0xFFFFFFFFu, before + sum > target);
      if (past != 0) {
        const int lane = __ffs(past) - 1;
        entry = first + lane;
        entry_begin += (before + __shfl_sync(0xFFFFFFFFu, sum - own, lane)) * work_tiles_of_entry();
        break;
      }
      before += __shfl_sync(0xFFFFFFFFu, sum, tile::kWarpSize - 1);
    }
    return before;
  }
};

}  // namespace flash_attn_ext
