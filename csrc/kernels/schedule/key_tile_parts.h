// Parts of key tiles, for masks through which some keys are seen by many more queries than others: global tokens, say.
// The key-stationary backward pass would end on such a key tile. So it is divided into parts, work tiles of about the
// same number of iterations, which come one after the other in the order in which CTAs fetch work tiles. Each part
// stores its partial dK and dV, and the last one to arrive adds them up in the order of parts (key_epilogue.cuh).
//
// An iteration has the same rank as without parts, and a part waits only for work tiles that were fetched before it, as
// the key tile does. So parts change no bit of dQ, and cause no deadlock.
#pragma once

#include <cstdint>

#include "attention/host_device.h"

namespace flash_attn_ext {

struct KeyTileParts {
  static constexpr int64_t kWorkBytes = 128;  // of a MaskedKeyTileWork, which describes a part to a kernel
  // Partial dK and dV take about as long as a few iterations do.
  static constexpr int64_t kLeastIterations = 16;

  int iterations;  // a part has about as many

  // `tiles` key tiles have iterations, `total` of them in the launch.
  FLASH_HOST_DEVICE static KeyTileParts of(int64_t total, int64_t tiles, int64_t ctas) {
    // A launch ends when its last parts do, so a part has at most about an eighth of a CTA's share of the iterations.
    // But key tiles of about the mean length stay whole.
    constexpr int64_t kPartsOfCta = 8;
    constexpr int64_t kTimesMean = 2;
    const int64_t of_cta = total / (kPartsOfCta * ctas);
    const int64_t of_mean = tiles == 0 ? 0 : kTimesMean * total / tiles;
    const int64_t longer = of_cta > of_mean ? of_cta : of_mean;
    return {static_cast<int>(longer > kLeastIterations ? longer : kLeastIterations)};
  }

  // How many parts a key tile has.
  FLASH_HOST_DEVICE int count(int of_tile) const {
    const int rounded = (of_tile + iterations / 2) / iterations;
    return rounded > 1 ? rounded : 1;
  }

  // The entries of the table of work tiles, of which each part may take one. The last ones may say that there are no
  // more.
  template <class Int>
  FLASH_HOST_DEVICE static Int table_entries(Int work_tiles, int part_sums) {
    return work_tiles + static_cast<Int>(part_sums);
  }

  // The memory in which the division of this many work tiles lies (sm90/backward/key_stationary/key_tile_list.cu).
  static constexpr int64_t division_bytes(int64_t work_tiles) { return 12 + 8 * work_tiles; }

  // The first iteration of a part. Those of part `count` would begin at the end.
  FLASH_HOST_DEVICE static int first(int of_tile, int part, int count) {
    return static_cast<int>(int64_t{of_tile} * part / count);
  }
};

}  // namespace flash_attn_ext
