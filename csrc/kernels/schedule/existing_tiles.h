// The work tiles of a packed batch that exist. A schedule numbers work tiles as if all sequences were as long as the
// longest one. Beside one long sequence most work tiles of short ones do not exist, and CTAs would take longer to fetch
// and skip these than to compute the others. So those that exist are listed first, in the order of the schedule
// (sm90/existing_tiles.cu).
#pragma once

#include <cstdint>

#include "attention/division.h"
#include "attention/host_device.h"
#include "kernels/schedule/loop_order.h"

namespace flash_attn_ext {

struct ExistingTiles {
  static constexpr int kNone = -1;     // an entry behind the last work tile that exists
  static constexpr int kChunk = 1024;  // work tiles that a CTA lists

  const uint32_t* count = nullptr;  // of work tiles that exist; null: there is no list, and CTAs fetch all work tiles
  const int* list = nullptr;        // the index of each in the schedule
  uint32_t entries = 0;             // of the list: as many as may exist

  // How many entries a list of `all` work tiles has, of which `most` may exist, or 0 where there is none.
  static int64_t count_entries(int64_t all, int64_t most, int64_t sms) {
    // Listing takes two short kernels. An SM takes about as long to fetch this many work tiles that do not exist.
    constexpr int64_t kFewTiles = 8;
    return all - most >= kFewTiles * sms ? most : 0;
  }

  // The memory of a list: the count, those of each chunk, and the entries.
  static int64_t chunks(int64_t all) { return attention::ceil_div(all, int64_t{kChunk}); }
  static int64_t bytes(int64_t all, int64_t entries) { return (1 + chunks(all) + entries) * int64_t{sizeof(int)}; }

  FLASH_HOST_DEVICE bool present() const { return list != nullptr; }
  // How many work tiles there may be, and how many there are, of `all` of the schedule.
  FLASH_HOST_DEVICE uint32_t most(uint32_t all) const { return present() ? entries : all; }
  FLASH_HOST_DEVICE uint32_t num_work_tiles(uint32_t all) const { return present() ? *count : all; }
  // The index-th work tile to be fetched.
  FLASH_HOST_DEVICE int at(uint32_t index) const { return present() ? list[index] : static_cast<int>(index); }

  // The phase_end of the index-th entry of a list. In cyclic order the key tiles of a pair and phase follow each other;
  // elsewhere there is no such end. key_tiles: of the sequence.
  FLASH_HOST_DEVICE static int end_of_phase(const LoopOrder& order, const LoopOrder::WorkTile& work_tile, int key_tiles,
                                            uint32_t index) {
    if (work_tile.direction != LoopDirection::kCyclic) return 0;
    const int phases = 1 << order.log2_phases;
    const int in_phase = work_tile.tile >> order.log2_phases;
    const int phase = work_tile.tile - (in_phase << order.log2_phases);
    return static_cast<int>(index) - in_phase + ((key_tiles + phases - 1 - phase) >> order.log2_phases);
  }
};

}  // namespace flash_attn_ext
