// How the work list of key tiles is divided into a stream-K range for each CTA, and which CTAs have splits of a work
// tile (schedule/stream_k.cuh).
#pragma once

#include <cstdint>

#include "attention/host_device.h"

namespace flash_attn_ext {

// The splits of a work tile. Each CTA stores the partial O and the softmax state of its split in a numbered slot of the
// workspace.
struct TileSplits {
  int first;   // slot of the first split
  int second;  // slot of the second split; the others follow at a step that the kernel knows
  int count;   // 1: the work tile is not split; kHasNan: the same, and its result has a NaN

  static constexpr int kHasNan = 0;

  FLASH_HOST_DEVICE int slot(int split, int step) const { return split == 0 ? first : second + (split - 1) * step; }
};

// A CTA leaves at most two work tiles unfinished: those with which its range begins and ends.
inline constexpr int kSlotsPerBlock = 2;

// A range of indices of splits. They take the place of slots where a CTA may have splits of any number of work tiles.
struct SplitRange {
  int begin;
  int end;
};

// Ranges as even as whole tiles can be: range i begins at tile i * num_tiles / blocks, rounded down. Where all work
// tiles have the same number of key tiles, and the number of CTAs is a multiple of that of work tiles, no range has
// tiles of two.
struct WorkListShares {
  static constexpr int kBits = 20;  // with fewer than 2^(kBits / 2) CTAs, rounding is that of exact numbers
  static constexpr uint32_t kMostBlocks = (1u << (32 - kBits)) - 1;  // numbers fit 32 bits

  uint32_t blocks;
  uint32_t share;  // whole tiles of a range
  uint32_t rest;   // what is left, in 2^-kBits of a tile

  FLASH_HOST_DEVICE static WorkListShares of(uint32_t num_tiles, uint32_t most_blocks, uint32_t least_tiles) {
    const uint32_t wanted = num_tiles / least_tiles;
    const uint32_t blocks = wanted == 0 ? 1 : wanted < most_blocks ? wanted : most_blocks;
    const uint32_t share = num_tiles / blocks;
    return {blocks, share, ((num_tiles - share * blocks) << kBits) / blocks + 1};
  }

  FLASH_HOST_DEVICE uint32_t begin_of(uint32_t block) const { return block * share + ((block * rest) >> kBits); }

  FLASH_HOST_DEVICE uint32_t block_of(uint32_t tile) const {
    constexpr float kPart = 1.0f / (1 << kBits);
    auto block = static_cast<uint32_t>(static_cast<float>(tile) / (static_cast<float>(share) + rest * kPart));
    while (begin_of(block) > tile) --block;
    while (begin_of(block + 1) <= tile) ++block;
    return block;
  }

  // The splits of the work tile that has tiles [begin, end) of the work list.
  FLASH_HOST_DEVICE TileSplits splits(uint32_t begin, uint32_t end) const {
    const uint32_t first = block_of(begin);
    const uint32_t last = block_of(end - 1);
    return {static_cast<int>(first * kSlotsPerBlock + (begin_of(first) < begin ? 1 : 0)),
            static_cast<int>((first + 1) * kSlotsPerBlock), static_cast<int>(last - first) + 1};
  }

  // From one split to the next, either the CTA, or the work tile, or both are the next one. So no two splits have the
  // same index, and the indices of a work tile's splits are consecutive.
  FLASH_HOST_DEVICE static int split_index(uint32_t block, int work_tile) {
    return static_cast<int>(block) + work_tile;
  }
  // The range of a work tile's splits, where all work tiles have the same number of key tiles.
  FLASH_HOST_DEVICE SplitRange split_range(int work_tile, int tiles) const {
    return {split_index(block_of(work_tile * tiles), work_tile),
            split_index(block_of((work_tile + 1) * tiles - 1), work_tile) + 1};
  }
};

}  // namespace flash_attn_ext
