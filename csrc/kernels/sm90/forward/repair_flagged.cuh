// Which rows are recomputed. Rows with a non-finite result are recomputed without tensor cores, since the result may be
// 0 times a NaN or infinity of a key that the row does not attend to.
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
__device__ __forceinline__ uint8_t& warp_flag(const TileFlags& flags, int tile) {
  return flags.flags[int64_t{tile} * Traits::kWarps + tile::warp() - tile::kWarpgroupSize / tile::kWarpSize];
}

// Whether stores of the calling warp's rows of a work tile are enabled. When the work tile is recomputed, only flagged
// rows are stored, so that the result of a warp's rows depends on no other warp's.
template <class Traits, Rescale kRescale>
__device__ __forceinline__ bool is_store_enabled(const TileFlags& flags, int tile) {
  if constexpr (!Traits::kKeepsFirstMaximum || kRescale == Rescale::kNever) return true;
  return uniform(warp_flag<Traits>(flags, tile)) != 0;
}

// Sets or clears the flag of the calling warp's rows. This kernel recomputes rows whose sum left the range of
// Rescale::kNever; repair_flagged recomputes those that are not finite even then.
template <class Traits, Rescale kRescale>
__device__ __forceinline__ void flag_rows(const TileFlags& flags, int tile, bool needs_recompute, int& any_flagged) {
  if (tile::lane() == 0) {
    warp_flag<Traits>(flags, tile) = needs_recompute;
    if (kRescale == Rescale::kNever && needs_recompute) *const_cast<volatile int*>(&any_flagged) = 1;
  }
  __syncwarp();
}

// Recomputes the calling warp's flagged rows of all work tiles that its CTA had. last_tile: the last of these;
// first_row: the warp's first row in a tile.
template <class Traits>
__device__ __forceinline__ void repair_flagged(const ForwardArguments& args, int last_tile, int first_row) {
  constexpr int kRows = 16;
  const attention::ForwardParams& p = args.params;
  // A single loop, so that what the rows of a tile share takes no registers while a row is computed.
#pragma unroll 1
  for (int tile = last_tile, row = 0; tile >= 0;) {
    if (row == kRows || warp_flag<Traits>(args.flags, tile) == 0) {
      tile = args.flags.previous[tile];
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
