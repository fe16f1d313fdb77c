// The thread that starts all copies.
#pragma once

#include "kernels/sm90/backward_few_queries/traits.h"

namespace flash_attn_ext::sm90 {

template <class Traits>
struct FewQueriesProducer {
  using Shared = FewQueriesShared<Traits>;

  const FewQueriesArguments& args;
  Shared& shared;
  typename decltype(Shared::query_ring)::Position query_at{};
  typename decltype(Shared::k_ring)::Position key_at{};

  __device__ __forceinline__ void run() {
    for_each_segment(args, shared.stretch, [&](const Segment& segment) {
#pragma unroll 1
      for (int i = 0; i < segment.count; ++i) {
        const int row = (segment.tile + i) * Traits::kKeys;
        send_keys(shared.k, args.k, shared.k_ring, segment, row);
        if (i == 0) send_queries(segment);  // whose stage is given back later than that of keys
        send_keys(shared.v, args.v, shared.v_ring, segment, row);
        key_at.advance();
      }
    });
  }

 private:
  using KeyTile = typename Traits::KeyTile;
  using QueryTile = typename Traits::QueryTile;

  // K or V of a tile.
  __device__ __forceinline__ void send_keys(KeyTile (&stages)[Shared::kStages], const OperandMap& operand,
                                            decltype(Shared::k_ring)& ring, const Segment& segment, int row) const {
    ring.wait_empty(key_at);
    ptx::Barrier& full = ring.full[key_at.stage];
    ptx::arrive_expecting(full, KeyTile::kBytes);
    stages[key_at.stage].copy(operand.map, full, origin(operand, segment, row));
  }

  __device__ __forceinline__ void send_queries(const Segment& segment) {
    shared.query_ring.wait_empty(query_at);
    ptx::Barrier& full = shared.query_ring.full[query_at.stage];
    ptx::arrive_expecting(full, 2 * QueryTile::kBytes);
    shared.q.copy(args.q.map, full, origin(args.q, segment, 0));
    shared.dout.copy(args.dout.map, full, origin(args.dout, segment, 0));
    query_at.advance();
  }

  __device__ __forceinline__ static ptx::BoxOrigin origin(const OperandMap& operand, const Segment& segment, int row) {
    return {0, row, segment.head * operand.head_step, segment.batch * operand.batch_step};
  }
};

}  // namespace flash_attn_ext::sm90
