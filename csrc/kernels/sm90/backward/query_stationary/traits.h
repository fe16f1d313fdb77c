// Arguments, traits and shared memory of the query-stationary backward kernel. The key tiles of all pairs, each of a
// head and a batch entry, form one work list, and each CTA has a range of it.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "kernels/config/query_stationary.h"
#include "kernels/schedule/tile_splits.h"
#include "kernels/sm90/tensor_map.h"
#include "tile/sm90/gemm.h"
#include "tile/sm90/pipeline.h"

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
  float* dq_partials;     // of each CTA and pair: dQ / scale, in register order
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

template <class ElementType, QueryStationaryConfig kConfigValue>
struct QueryStationaryTraits {
  using Element = ElementType;
  static constexpr QueryStationaryConfig kConfig = kConfigValue;
  static constexpr HeadDims kDims = kConfig.dims;
  static constexpr bool kMasked = kConfig.score == ScoreMode::kMask;
  static constexpr int kKeys = kStationaryQueriesKeys;
  static constexpr int kQueries = kStationaryQueries;
  static constexpr int kWarpgroups = kQueries / tile::kWarpgroupRows;  // consumers; there is one more for the producer
  static constexpr int kComputingThreads = kWarpgroups * tile::kWarpgroupSize;
  static constexpr int kThreads = kComputingThreads + tile::kWarpgroupSize;
  // One warpgroup has dV of a key tile, the other one dK.
  static_assert(kWarpgroups == 2 && kKeys == tile::kWarpgroupRows && kDims.qk == kDims.v);
  static_assert(has_registers(kWarpgroups, kConfig.consumer_registers, kConfig.producer_registers));

  using QueryTile = tile::SmemTile<Element, kQueries, kDims.qk>;  // Q and dO
  using KeyTile = tile::SmemTile<Element, kKeys, kDims.qk>;       // K and V, dK and dV
  using ScoreTile = tile::SmemTile<Element, kQueries, kKeys>;     // P and dS
  using Scores = tile::WarpgroupAccumulator<kKeys>;               // rows are queries
  using Staging = QueryTile;                                      // of dV and dK
  using Sums = tile::WarpgroupAccumulator<kDims.qk>;              // of dQ, and of dV or dK
  static constexpr int kDqPartialFloats = kQueries * kDims.qk;    // of dQ
};

// P and dS of a key tile. Afterwards the stage holds 64 rows of dV and 64 of dK on their way to memory: each warp's
// rows lie where it had its rows of P and dS.
template <class Traits>
struct ScoreStage {
  typename Traits::ScoreTile weights;  // P
  typename Traits::ScoreTile dscores;

  __device__ __forceinline__ typename Traits::Staging& staging() {
    static_assert(sizeof(typename Traits::Staging) <= sizeof(ScoreStage));
    return reinterpret_cast<typename Traits::Staging&>(*this);
  }
};

template <class Traits>
struct QueryStationaryShared {
  static constexpr int kComputingWarps = 4 * Traits::kWarpgroups;
  static constexpr int kStages = Traits::kConfig.kv_stages;
  static constexpr int kScoreStages = 2;

  typename Traits::QueryTile q;
  typename Traits::QueryTile dout;
  typename Traits::KeyTile k[kStages];
  typename Traits::KeyTile v[kStages];
  ScoreStage<Traits> scores[kScoreStages];
  TileSpan span;                             // of the CTA
  tile::PipelineBarriers<1> query_pipeline;  // Q and dO
  tile::PipelineBarriers<kStages> k_pipeline;
  tile::PipelineBarriers<kStages> v_pipeline;

  __device__ __forceinline__ void init(const WorkListShares& work_list) {
    span = {static_cast<int>(work_list.begin_of(blockIdx.x)), static_cast<int>(work_list.begin_of(blockIdx.x + 1))};
    query_pipeline.init(kComputingWarps);
    k_pipeline.init(kComputingWarps);
    v_pipeline.init(kComputingWarps);
    ptx::fence_barrier_init();
  }
};

}  // namespace flash_attn_ext::sm90
