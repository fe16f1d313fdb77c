// WorkListShares on random work lists. Every tile belongs to one CTA, and the CTAs' numbers of tiles differ by at most
// one. The splits of a work tile are those of the CTAs that have tiles of it. If all work tiles have the same length,
// and the number of CTAs is a multiple of theirs, no CTA has tiles of two work tiles.
#include <cstdint>
#include <cstdio>
#include <random>

#include "kernels/schedule/tile_splits.h"

namespace {

using flash_attn_ext::kSlotsPerBlock;
using flash_attn_ext::TileSplits;
using flash_attn_ext::WorkListShares;

struct Problem {
  uint32_t line;
  uint32_t most_blocks;
  uint32_t least_tiles;
};

bool fails(const char* what, const Problem& problem) {
  std::printf("%s: %u tiles, at most %u blocks, of at least %u tiles\n", what, problem.line, problem.most_blocks,
              problem.least_tiles);
  return false;
}

bool blocks_are_right(const Problem& problem, const WorkListShares& shares) {
  const auto [line, most_blocks, least_tiles] = problem;
  if (shares.blocks == 0 || shares.blocks > most_blocks) return fails("blocks", problem);
  if (shares.blocks > 1 && line / shares.blocks < least_tiles) return fails("too few tiles", problem);
  if (shares.begin_of(0) != 0 || shares.begin_of(shares.blocks) != line) return fails("ends", problem);
  for (uint32_t block = 0; block < shares.blocks; ++block) {
    const uint32_t begin = shares.begin_of(block);
    const uint32_t end = shares.begin_of(block + 1);
    if (end - begin != line / shares.blocks && end - begin != (line - 1) / shares.blocks + 1) {
      return fails("share", problem);
    }
    if (shares.block_of(begin) != block || shares.block_of(end - 1) != block) return fails("block of a tile", problem);
  }
  return true;
}

bool parts_are_right(const Problem& problem, const WorkListShares& shares, uint32_t begin, uint32_t end) {
  const TileSplits parts = shares.splits(begin, end);
  for (int part = 0; part < parts.count; ++part) {
    const auto slot = static_cast<uint32_t>(parts.slot(part, kSlotsPerBlock));
    const uint32_t block = slot / kSlotsPerBlock;
    const bool begins_with_it = shares.begin_of(block) >= begin;
    if (slot % kSlotsPerBlock != (begins_with_it ? 0 : 1)) return fails("slot", problem);
    if (shares.begin_of(block) >= end || shares.begin_of(block + 1) <= begin) return fails("a part too many", problem);
  }
  const auto last = static_cast<uint32_t>(parts.slot(parts.count - 1, kSlotsPerBlock)) / kSlotsPerBlock;
  const uint32_t first = static_cast<uint32_t>(parts.first) / kSlotsPerBlock;
  if (shares.begin_of(first) > begin || shares.begin_of(last + 1) < end) return fails("a part too few", problem);
  return last - first + 1 == static_cast<uint32_t>(parts.count) || fails("count", problem);
}

// The numbers of splits when CTAs store one split of every work tile that they have tiles of. All have `tiles` tiles.
bool numbers_are_right(const Problem& problem, const WorkListShares& shares, uint32_t tiles) {
  const uint32_t items = problem.line / tiles;
  int next = 0;
  uint32_t block = 0;
  for (uint32_t item = 0; item < items; ++item) {
    const flash_attn_ext::SplitRange parts = shares.split_range(static_cast<int>(item), static_cast<int>(tiles));
    int part = parts.begin;
    if (part < next || part > next + 1) return fails("numbers that overlap, or are left out", problem);
    for (block = shares.block_of(item * tiles); shares.begin_of(block) < (item + 1) * tiles; ++block, ++part) {
      if (part != WorkListShares::split_index(block, static_cast<int>(item))) return fails("number of a part", problem);
    }
    if (part != parts.end) return fails("end of numbers", problem);
    next = part;
  }
  return next <= static_cast<int>(shares.blocks + items) - 1 || fails("more numbers than blocks and items", problem);
}

}  // namespace

int main() {
  std::mt19937 random(1);
  for (int i = 0; i < 3000; ++i) {
    const uint32_t items = 1 + random() % (i % 2 == 0 ? 20 : 400);
    const uint32_t tiles = 1 + random() % (i % 3 == 0 ? 5 : i % 3 == 1 ? 300 : 100000);
    const uint32_t most_blocks = 1 + random() % (i % 5 == 0 ? WorkListShares::kMostBlocks : 1000u);
    const Problem problem = {items * tiles, most_blocks, 1 + static_cast<uint32_t>(random() % 4)};
    const WorkListShares shares = WorkListShares::of(problem.line, problem.most_blocks, problem.least_tiles);
    if (!blocks_are_right(problem, shares)) return 1;
    for (uint32_t item = 0; item < items; ++item) {
      if (!parts_are_right(problem, shares, item * tiles, (item + 1) * tiles)) return 1;
    }
    if (!numbers_are_right(problem, shares, tiles)) return 1;
    if (shares.blocks % items != 0 || shares.blocks >= 1u << (WorkListShares::kBits / 2)) continue;
    for (uint32_t item = 0; item < items; ++item) {
      if (shares.begin_of(item * (shares.blocks / items)) != item * tiles) return !fails("aligned", problem);
    }
  }
}
