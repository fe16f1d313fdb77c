// Which key tiles the queries of the dQ kernel attend, where a mask may hide whole tiles.
#pragma once

#include "kernels/sm90/backward/two_pass/traits.h"
#include "kernels/sm90/mask_tile_row.h"

namespace flash_attn_ext::sm90 {

// Finds these tiles in ascending order. Several tiles are looked up at once, so that none waits for the one before it.
template <class Traits>
class UnmaskedKeys {
 public:
  struct Found {
    int tile;  // kNone: there are no more tiles
    int flags[Traits::kWarpgroups];
  };
  static constexpr int kNone = -1;

  __device__ __forceinline__ UnmaskedKeys(const TwoPassArguments& args, const QueryTileWork& work)
      : work_(work), first_(work.begin - kBatch) {
#pragma unroll
    for (int w = 0; w < Traits::kWarpgroups; ++w) {
      rows_[w] = MaskTileRow::of(args.params.score_mod.mask_tiles, work.batch, work.head, work.tile + w);
    }
  }

  __device__ __forceinline__ Found next() {
#pragma unroll 1
    while ((some_[0] | some_[1]) == 0) {
      first_ += kBatch;
      if (first_ >= work_.end) return {.tile = kNone};
      look_up();
    }
    const int i = __ffs(static_cast<int>(some_[0] | some_[1])) - 1;
    Found found = {.tile = first_ + i};
#pragma unroll
    for (int w = 0; w < Traits::kWarpgroups; ++w) {
      found.flags[w] =
          (some_[w] >> i & 1u ? UnmaskedIteration::kSeen : 0) | (mixed_[w] >> i & 1u ? UnmaskedIteration::kMasked : 0);
      some_[w] &= ~(1u << i);
    }
    return found;
  }

 private:
  static constexpr int kBatch = 8;
  static_assert(Traits::kWarpgroups == 2);

  __device__ __forceinline__ void look_up() {
#pragma unroll
    for (int w = 0; w < Traits::kWarpgroups; ++w) {
      const TileRange own = work_.own[w];
      uint32_t flags[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int tile = first_ + i;
        flags[i] = tile >= own.begin && tile < own.end ? rows_[w].flags(tile) : 0;
      }
      some_[w] = mixed_[w] = 0;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        some_[w] |= (flags[i] & attention::MaskTiles::kSomeTrue ? 1u : 0u) << i;
        mixed_[w] |= (flags[i] & attention::MaskTiles::kSomeFalse ? 1u : 0u) << i;
      }
    }
  }

  const QueryTileWork& work_;
  int first_;  // the first tile of those that were looked up together
  MaskTileRow rows_[Traits::kWarpgroups];
  uint32_t some_[Traits::kWarpgroups] = {};
  uint32_t mixed_[Traits::kWarpgroups] = {};
};

}  // namespace flash_attn_ext::sm90
