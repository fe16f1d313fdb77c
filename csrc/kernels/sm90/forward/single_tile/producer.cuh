// The scheduler thread, which publishes work tiles, and the producer thread, which issues all TMA loads.
#pragma once

#include "kernels/sm90/forward/single_tile/traits.h"
#include "ptx/dependent_launch.h"

namespace flash_attn_ext::sm90 {

template <class Traits>
struct SingleTileScheduler {
  using Shared = SingleTileShared<Traits>;

  const SingleTileArguments& args;
  Shared& shared;
  typename Shared::WorkPipeline::State work_state{};

  // Called by a warp, of which one thread continues.
  __device__ __forceinline__ void start() {
    if (args.intervals.present()) ptx::allow_dependent_launch();  // the scan of the mask is complete
    if (tile::lane() == 0) run();
  }

 private:
  __device__ __forceinline__ void run() {
    for_each_static_work_tile(args.schedule.num_blocks, [&](int index) {
      WorkTile& work_tile = next();
      locate(work_tile, args, index);
      if (work_tile.query_tiles > 0) publish();
    });
    next().query_tiles = 0;
    publish();
  }

  __device__ __forceinline__ WorkTile& next() {
    shared.work_pipeline.producer_acquire(work_state);
    return shared.work_tile[work_state.stage];
  }
  __device__ __forceinline__ void publish() {
    ptx::arrive(shared.work_pipeline.full[work_state.stage]);
    work_state.advance();
  }
};

template <class Traits>
struct SingleTileProducer {
  using Shared = SingleTileShared<Traits>;

  const SingleTileArguments& args;
  Shared& shared;
  typename Shared::WorkPipeline::State work_state{};
  typename Shared::QueryPipeline::State q_state{};
  int warpgroup = 0;  // the consumer of the next tile of queries

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (;; work_state.advance()) {
      shared.work_pipeline.consumer_wait(work_state);
      const WorkTile& work_tile = shared.work_tile[work_state.stage];
      const int tiles = work_tile.query_tiles;
      if (tiles == 0) break;
      load_keys(shared.k[work_state.stage], args.k, work_tile, shared.k_full[work_state.stage]);
      load_queries(work_tile, 0);
      load_keys(shared.v[work_state.stage], args.v, work_tile, shared.v_full[work_state.stage]);
#pragma unroll 1
      for (int i = 1; i < tiles; ++i) load_queries(work_tile, i);
      ptx::arrive(shared.work_pipeline.empty[work_state.stage]);
    }
  }

 private:
  template <class Tile>
  __device__ __forceinline__ static void load_keys(Tile& to, const TmaDescriptor& operand, const WorkTile& work_tile,
                                                   ptx::Barrier& full) {
    ptx::arrive_expecting(full, Tile::kBytes);
    to.copy(operand.map, full,
            {.column = 0,
             .row = static_cast<int>(work_tile.coord.sequence.key_begin),
             .head = static_cast<int>(work_tile.coord.key_head) * operand.head_step,
             .batch = static_cast<int>(work_tile.coord.sequence.batch) * operand.batch_step});
  }

  __device__ __forceinline__ void load_queries(const WorkTile& work_tile, int query_tile) {
    auto& pipeline = shared.queries[warpgroup];
    pipeline.producer_acquire(q_state);
    ptx::Barrier& full = pipeline.full[q_state.stage];
    ptx::arrive_expecting(full, Traits::QTile::kBytes);
    shared.q[warpgroup][q_state.stage].copy(
        args.q.map, full,
        {.column = 0,
         .row = static_cast<int>(work_tile.coord.sequence.query_begin) + work_tile.first_query +
                query_tile * tile::kWarpgroupRows,
         .head = static_cast<int>(work_tile.coord.head) * args.q.head_step,
         .batch = static_cast<int>(work_tile.coord.sequence.batch) * args.q.batch_step});
    if (++warpgroup == Shared::kWarpgroups) {
      warpgroup = 0;
      q_state.advance();
    }
  }
};

}  // namespace flash_attn_ext::sm90
