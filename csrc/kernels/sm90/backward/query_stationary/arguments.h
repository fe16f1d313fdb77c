// The arguments of the query-stationary backward kernels. The key tiles of all pairs, each of a head and a batch entry,
// form one work list, and each CTA has a range of it.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "kernels/config/query_stationary.h"
#include "kernels/schedule/tile_splits.h"
#include "kernels/sm90/tensor_map.h"

namespace flash_attn_ext::sm90 {

struct QueryStationaryArguments {
  static constexpr int kQueryFlags = kStationaryQueries / 16;  // of a pair

  TmaDescriptor q;
  TmaDescriptor k;
  TmaDescriptor v;
  TmaDescriptor dout;
  TmaDescriptor dk;  // in TMA boxes of a warp's rows
  TmaDescriptor dv;
  attention::BackwardParams params;
  WorkListShares work_list;
  int tiles;              // key tiles of a pair, which is head * batch + batch entry
  float* dq_splits;       // of each CTA and pair: dQ / scale, in register order
  uint8_t* dq_nan_flags;  // one for each warp's 16 rows
  uint8_t* dkdv_nan_flags;
  int slices_of_sum;  // of dQ, which a CTA adds up
  float scale;
  float scale_log2e;
};

// A CTA's range of the work list.
struct TileSpan {
  int begin;
  int end;
};

// The key tiles of one pair in such a range.
struct Segment {
  int pair;
  int head;
  int batch;
  int tile;   // the first key tile
  int count;  // of key tiles
};

// Calls act(segment) for each segment of the span. The span is in shared memory, because it is seldom read.
template <class Act>
__device__ __forceinline__ void for_each_segment(const QueryStationaryArguments& args, const TileSpan& span,
                                                 Act&& act) {
  const auto batch = static_cast<int>(args.params.batch);
#pragma unroll 1
  for (int next = span.begin; next < span.end;) {
    const int pair = next / args.tiles;
    const int tile = next - pair * args.tiles;
    const int count = min(span.end - next, args.tiles - tile);
    act(Segment{pair, pair / batch, pair % batch, tile, count});
    next += count;
  }
}

}  // namespace flash_attn_ext::sm90
