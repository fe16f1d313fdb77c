// The producer thread: it issues all TMA copies.
#pragma once

#include "kernels/sm90/backward/query_stationary/traits.h"

namespace flash_attn_ext::sm90 {

template <class Traits>
struct QueryStationaryProducer {
  using Shared = QueryStationaryShared<Traits>;

  const QueryStationaryArguments& args;
  Shared& shared;
  typename decltype(Shared::query_pipeline)::State query_state{};
  typename decltype(Shared::k_pipeline)::State key_state{};

  __device__ __forceinline__ void run() {
    for_each_segment(args, shared.span, [&](const Segment& segment) {
#pragma unroll 1
      for (int i = 0; i < segment.count; ++i) {
        const int row = (segment.tile + i) * Traits::kKeys;
        load_keys(shared.k, args.k, shared.k_pipeline, segment, row);
        if (i == 0) load_queries(segment);  // after K, because their stage is released later
        load_keys(shared.v, args.v, shared.v_pipeline, segment, row);
        key_state.advance();
      }
    });
  }

 private:
  using KeyTile = typename Traits::KeyTile;
  using QueryTile = typename Traits::QueryTile;

  // K or V of a key tile.
  __device__ __forceinline__ void load_keys(KeyTile (&stages)[Shared::kStages], const TmaDescriptor& operand,
                                            decltype(Shared::k_pipeline)& pipeline, const Segment& segment,
                                            int row) const {
    pipeline.producer_acquire(key_state);
    ptx::Barrier& full = pipeline.full[key_state.stage];
    ptx::arrive_expecting(full, KeyTile::kBytes);
    stages[key_state.stage].copy(operand.map, full, origin(operand, segment, row));
  }

  __device__ __forceinline__ void load_queries(const Segment& segment) {
    shared.query_pipeline.producer_acquire(query_state);
    ptx::Barrier& full = shared.query_pipeline.full[query_state.stage];
    ptx::arrive_expecting(full, 2 * QueryTile::kBytes);
    shared.q.copy(args.q.map, full, origin(args.q, segment, 0));
    shared.dout.copy(args.dout.map, full, origin(args.dout, segment, 0));
    query_state.advance();
  }

  __device__ __forceinline__ static ptx::TmaCoordinate origin(const TmaDescriptor& operand, const Segment& segment,
                                                              int row) {
    return {0, row, segment.head * operand.head_step, segment.batch * operand.batch_step};
  }
};

}  // namespace flash_attn_ext::sm90
