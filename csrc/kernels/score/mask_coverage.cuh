// Which tiles of scores a mask, intervals or blocks hide completely, in part or not at all.
#pragma once

#include "kernels/score/score_tile.cuh"

namespace flash_attn_ext {

enum class MaskCoverage { kNone, kMixed, kAll };

// The coverage of queries x keys, positions inside the sequence.
__device__ __forceinline__ MaskCoverage mask_coverage(const attention::AttentionParams& p, const HeadCoord& coord,
                                                      const attention::Interval& queries,
                                                      const attention::Interval& keys) {
  using attention::MaskTiles;
  const MaskTiles& tiles = p.score_mod.mask_tiles;
  if (!p.score_mod.hides_keys()) return MaskCoverage::kAll;
  if (!tiles.present()) return MaskCoverage::kMixed;
  const uint8_t* head = tiles.row(coord.sequence.batch, coord.head, 0);
  const int64_t query_end = min(queries.end, coord.sequence.num_queries);
  const int64_t key_end = min(keys.end, coord.sequence.num_keys);
  uint8_t flags = 0;
  for (int64_t query = queries.begin / MaskTiles::kSize; query * MaskTiles::kSize < query_end; ++query) {
    for (int64_t key = keys.begin / MaskTiles::kSize; key * MaskTiles::kSize < key_end; ++key) {
      flags |= head[query * tiles.query_stride + key * tiles.key_stride];
    }
  }
  if ((flags & MaskTiles::kSomeTrue) == 0) return MaskCoverage::kNone;
  return (flags & MaskTiles::kSomeFalse) == 0 ? MaskCoverage::kAll : MaskCoverage::kMixed;
}

// A key or query tile of the mainloop: its index, and whether the mask has to be applied to it.
struct MainloopTile {
  int tile;
  bool masked;
};

// The first of tiles first, first + kStep, ... before end that the mask does not hide completely, or end if there is
// none. coverage(tile) looks it up.
template <int kStep, bool kHasMask, class CoverageOf>
__device__ __forceinline__ MainloopTile next_unmasked(int first, int end, CoverageOf&& coverage) {
  if constexpr (kHasMask) {
    for (int tile = first; tile != end; tile += kStep) {
      const MaskCoverage found = coverage(tile);
      if (found != MaskCoverage::kNone) return {tile, found == MaskCoverage::kMixed};
    }
    return {end, false};
  }
  return {first, false};
}

}  // namespace flash_attn_ext
