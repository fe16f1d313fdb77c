// What the backward kernels of few queries are told, and how they divide the line of tiles of keys of all pairs of a
// head and a batch entry: each block has a stretch of neighbouring tiles.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "kernels/schedule/item_parts.h"
#include "kernels/sm90/tensor_map.h"
#include "kernels/tile_config_few_queries.h"

namespace flash_attn_ext::sm90 {

struct FewQueriesArguments {
  static constexpr int kQueryFlags = kFewQueries / 16;  // of a pair

  OperandMap q;
  OperandMap k;
  OperandMap v;
  OperandMap dout;
  OperandMap dk;  // in boxes of a warp's rows
  OperandMap dv;
  attention::BackwardParams params;
  LineShares line;
  int tiles;              // of a pair, which is head * batch + batch entry
  float* dq_parts;        // of each block and pair: dQ / scale, in the order of accumulators
  uint8_t* dq_nan_flags;  // one for each warp's 16 rows
  uint8_t* dkdv_nan_flags;
  int slices_of_sum;  // of dQ, that a block adds up
  float scale;
  float scale_log2e;
};

// A block's tiles of keys.
struct Stretch {
  int begin;
  int end;
};

// What of it one pair has.
struct Segment {
  int pair;
  int head;
  int batch;
  int tile;   // of keys, the first one
  int count;  // of tiles
};

// Calls act(segment) for each of the stretch's, which is in shared memory, since it is read seldom.
template <class Act>
__device__ __forceinline__ void for_each_segment(const FewQueriesArguments& args, const Stretch& stretch, Act&& act) {
  const auto batch = static_cast<int>(args.params.batch);
#pragma unroll 1
  for (int next = stretch.begin; next < stretch.end;) {
    const int pair = next / args.tiles;
    const int tile = next - pair * args.tiles;
    const int count = min(stretch.end - next, args.tiles - tile);
    act(Segment{pair, pair / batch, pair % batch, tile, count});
    next += count;
  }
}

}  // namespace flash_attn_ext::sm90
