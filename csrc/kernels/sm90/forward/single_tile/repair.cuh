// Recomputes rows with a non-finite result without tensor cores, since the result may be 0 times a NaN or infinity of a
// key that the row does not attend to.
#pragma once

#include "kernels/common/rows/attention_rows.cuh"
#include "kernels/sm90/forward/single_tile/epilogue.cuh"

namespace flash_attn_ext::sm90 {

// Recomputes the calling warp's flagged rows of all work tiles that its CTA had.
template <class Traits>
__device__ __forceinline__ void repair_flagged(const SingleTileArguments& args, int warpgroup) {
  const attention::ForwardParams& p = args.params;
  int query_tile = warpgroup;
  WorkTile work_tile;
  for_each_work_tile(args, [&](int number) {
    locate(work_tile, args, number);
    const attention::Sequence sequence =
        p.sequences.at(work_tile.item.sequence.batch);  // including the keys that a mask hides
    const int first_query =
        work_tile.first_query + static_cast<int>(work_tile.item.sequence.query_begin - sequence.query_begin);
    const common::HeadItem head = common::head_item(p, sequence, work_tile.item.head);
#pragma unroll 1
    for (; query_tile < work_tile.query_tiles; query_tile += Traits::kConfig.warpgroups) {
      if (*nan_flag(args, work_tile, query_tile) == 0) continue;
      const int first = first_query + own_row(query_tile);
      const int end = min(first + 16, static_cast<int>(sequence.num_queries));
#pragma unroll 1
      for (int query = first; query < end; ++query) {
        common::compute_forward_row<typename Traits::Element>(p, head, query, {});
      }
    }
    query_tile -= work_tile.query_tiles;
  });
}

}  // namespace flash_attn_ext::sm90
