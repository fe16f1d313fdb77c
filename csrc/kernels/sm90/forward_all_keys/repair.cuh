// Rows in which something not finite came out, again without tensor cores: it may be 0 times what nobody attends.
#pragma once

#include "kernels/common/rows/attention_rows.cuh"
#include "kernels/sm90/forward_all_keys/finish.cuh"

namespace flash_attn_ext::sm90 {

// The calling warp's flagged rows, of all units that its block had.
template <class Traits>
__device__ __forceinline__ void repair_flagged(const AllKeysArguments& args, int warpgroup) {
  const attention::ForwardParams& p = args.params;
  int query_tile = warpgroup;
  Unit unit;
  for_each_unit(args, [&](int number) {
    locate(unit, args, number);
    const attention::Sequence sequence = p.sequences.at(unit.item.sequence.batch);  // with the keys that a mask hides
    const int first_query = unit.first_query + static_cast<int>(unit.item.sequence.query_begin - sequence.query_begin);
    const common::HeadItem head = common::head_item(p, sequence, unit.item.head);
#pragma unroll 1
    for (; query_tile < unit.query_tiles; query_tile += Traits::kTile.warpgroups) {
      if (*nan_flag(args, unit, query_tile) == 0) continue;
      const int first = first_query + own_row(query_tile);
      const int end = min(first + 16, static_cast<int>(sequence.num_queries));
#pragma unroll 1
      for (int query = first; query < end; ++query) {
        common::compute_forward_row<typename Traits::Element>(p, head, query, {});
      }
    }
    query_tile -= unit.query_tiles;
  });
}

}  // namespace flash_attn_ext::sm90
