// The line of tiles of keys, divided into a stretch for each block, and which blocks have parts of an item
// (schedule/key_division.cuh).
#pragma once

#include <cstdint>

#include "attention/host_device.h"

namespace flash_attn_ext {

// The parts of an item: the memory that each part's block leaves its O and softmax states in has a number, its slot.
struct ItemParts {
  int first;   // slot of the first part
  int second;  // of the second one; the others follow with a step that the kernel knows
  int count;   // 1: the item is finished; kHasNan: it is, and a NaN came out

  static constexpr int kHasNan = 0;

  FLASH_HOST_DEVICE int slot(int part, int step) const { return part == 0 ? first : second + (part - 1) * step; }
};

// Of two, since a block leaves at most two items unfinished: the one that it begins with and the one that it ends with.
inline constexpr int kSlotsPerBlock = 2;

// Where a block may have parts of any number of items instead.
struct PartNumbers {
  int begin;
  int end;
};

// Stretches as even as whole tiles can be: stretch i begins at tile i * line / blocks, rounded down. So where blocks
// are a multiple of items that have as many tiles each, none holds tiles of two.
struct LineShares {
  static constexpr int kBits = 20;  // with fewer than 2^(kBits / 2) blocks, rounding is that of exact numbers
  static constexpr uint32_t kMostBlocks = (1u << (32 - kBits)) - 1;  // numbers fit 32 bits

  uint32_t blocks;
  uint32_t share;  // whole tiles of a block
  uint32_t rest;   // and what is left, in 2^-kBits of a tile

  FLASH_HOST_DEVICE static LineShares of(uint32_t line, uint32_t most_blocks, uint32_t least_tiles) {
    const uint32_t wanted = line / least_tiles;
    const uint32_t blocks = wanted == 0 ? 1 : wanted < most_blocks ? wanted : most_blocks;
    const uint32_t share = line / blocks;
    return {blocks, share, ((line - share * blocks) << kBits) / blocks + 1};
  }

  FLASH_HOST_DEVICE uint32_t begin_of(uint32_t block) const { return block * share + ((block * rest) >> kBits); }

  FLASH_HOST_DEVICE uint32_t block_of(uint32_t tile) const {
    constexpr float kPart = 1.0f / (1 << kBits);
    auto block = static_cast<uint32_t>(static_cast<float>(tile) / (static_cast<float>(share) + rest * kPart));
    while (begin_of(block) > tile) --block;
    while (begin_of(block + 1) <= tile) ++block;
    return block;
  }

  // Of an item with tiles [begin, end) of the line.
  FLASH_HOST_DEVICE ItemParts parts(uint32_t begin, uint32_t end) const {
    const uint32_t first = block_of(begin);
    const uint32_t last = block_of(end - 1);
    return {static_cast<int>(first * kSlotsPerBlock + (begin_of(first) < begin ? 1 : 0)),
            static_cast<int>((first + 1) * kSlotsPerBlock), static_cast<int>(last - first) + 1};
  }

  // From one part to the next either the block, or the item, or both are the next one: so no two parts have the same
  // number, and those of an item are neighbours.
  FLASH_HOST_DEVICE static int part_number(uint32_t block, int item) { return static_cast<int>(block) + item; }
  // Of an item, where all items have as many tiles.
  FLASH_HOST_DEVICE PartNumbers part_numbers(int item, int tiles) const {
    return {part_number(block_of(item * tiles), item), part_number(block_of((item + 1) * tiles - 1), item) + 1};
  }
};

}  // namespace flash_attn_ext
