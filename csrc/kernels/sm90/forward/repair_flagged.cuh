// Which rows are computed again; those in which something not finite came out, without tensor cores: it may be 0 times
// what nobody attends.
#pragma once

#include "kernels/common/rows/attention_rows.cuh"
#include "kernels/schedule/block.cuh"
#include "kernels/sm90/forward/arguments.h"
#include "kernels/sm90/forward/row_softmax.cuh"
#include "kernels/sm90/forward/traits.h"
#include "kernels/sm90/uniform.h"

namespace flash_attn_ext::sm90 {

// The flag of the calling warp's rows of a tile.
template <class Traits>
__device__ __forceinline__ uint8_t& warp_flag(const TileNotes& notes, int tile) {
  return notes.flags[int64_t{tile} * Traits::kWarps + tile::warp() - tile::kWarpgroupSize / tile::kWarpSize];
}

// Whether the calling warp's rows of a tile are to be written. When it is computed again, flagged ones alone: what
// becomes of a warp's rows depends on no other's.
template <class Traits, Reference kReference>
__device__ __forceinline__ bool is_wanted(const TileNotes& notes, int tile) {
  if constexpr (!Traits::kFixesReference || kReference == Reference::kFirstTile) return true;
  return uniform(warp_flag<Traits>(notes, tile)) != 0;
}

// For those who compute rows again: this kernel what left the range of kFirstTile, and repair_flagged what is not
// finite even then.
template <class Traits, Reference kReference>
__device__ __forceinline__ void note_rows(const TileNotes& notes, int tile, bool suspicious, int& any_flagged) {
  if (tile::lane() == 0) {
    warp_flag<Traits>(notes, tile) = suspicious;
    if (kReference == Reference::kFirstTile && suspicious) *const_cast<volatile int*>(&any_flagged) = 1;
  }
  __syncwarp();
}

// The calling warp's flagged rows, of all tiles that its block had. last_tile: of these; first_row: the warp's, in a
// tile.
template <class Traits>
__device__ __forceinline__ void repair_flagged(const ForwardArguments& args, int last_tile, int first_row) {
  constexpr int kRows = 16;
  const attention::ForwardParams& p = args.params;
  // One loop: what a tile's rows have in common takes no registers while a row is computed.
#pragma unroll 1
  for (int tile = last_tile, row = 0; tile >= 0;) {
    if (row == kRows || warp_flag<Traits>(args.notes, tile) == 0) {
      tile = args.notes.previous[tile];
      row = 0;
      continue;
    }
    const Place at = args.schedule.place(static_cast<uint32_t>(tile));
    const attention::Sequence sequence = p.sequences.at(at.batch);
    const common::HeadItem head = common::head_item(p, sequence, at.key_head * args.schedule.group + at.head_of_group);
    const int first_column = static_cast<int>(at.slice) * kColumns;
    const int64_t query = first_query_of(args.schedule, at, Traits::kQueries) + first_row + row++;
    if (query >= sequence.num_queries) continue;
    common::compute_forward_row<typename Traits::Element>(p, head, query, {first_column, first_column + kColumns});
  }
}

}  // namespace flash_attn_ext::sm90
