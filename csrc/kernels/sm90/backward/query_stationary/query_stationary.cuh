// The query-stationary backward pass on Hopper: dQ, dK and dV of at most 128 queries of many keys
// (docs/kernels/sm90_backward_query_stationary.md).
//
// Grid: persistent CTAs, at most one per SM. Each has a stream-K range of tiles of 64 keys (schedule/tile_splits.h). Q
// and dO of a pair stay in shared memory and dQ in registers, and K and V stream past. Each key is read once, and its
// dK and dV are written once. Bound: memory.
//
//  Warpgroup 0         Producer: one thread issues all TMA copies.
//  Warpgroups 1 and 2  64 queries each (query_warpgroup.cuh).
//
// A CTA stores its partial dQ of each pair in float32, and sum_dq_partials.cuh adds these up in a fixed order. So no
// CTA waits for another one.
//
// Shared memory: Q and dO, pipelines of K and of V, and two stages of P and dS (QueryStationaryShared).
#pragma once

#include "kernels/sm90/backward/query_stationary/query_warpgroup.cuh"
#include "kernels/sm90/backward/query_stationary/traits.h"
#include "kernels/sm90/kernel.cuh"

namespace flash_attn_ext::sm90 {

// The producer thread: it issues all TMA copies.
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

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    query_stationary_kernel(const __grid_constant__ QueryStationaryArguments args) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<QueryStationaryShared<Traits>*>(shared_memory);
  const int warpgroup = warpgroup_index();
  init_barriers(shared, args.work_list);
  __syncthreads();
  ptx::allow_dependent_launch();  // the CTAs of the next kernel find no room before these end
  ptx::wait_for_kernel_before();
  if (warpgroup == 0) {
    ptx::release_registers<Traits::kConfig.producer_registers>();
    if (tile::warp() == 0 && ptx::elect()) QueryStationaryProducer<Traits>{args, shared}.run();
  } else {
    ptx::acquire_registers<Traits::kConfig.consumer_registers>();
    QueryStationaryWarpgroup<Traits>{args, shared, warpgroup - 1}.run();
  }
}

}  // namespace flash_attn_ext::sm90
