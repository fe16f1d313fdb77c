// The scheduler thread, which publishes work tiles, the producer thread, which issues all TMA loads, and the warps that
// write the key bias.
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

// A warp that writes its share of each work tile's key bias to shared memory, while TMA loads the keys. A mask is a
// bias of 0 and -inf, and keys that the sequence does not have get -inf, too. It loads the next work tile's
// bias before it waits for the stage of this one, so that the load's latency is hidden.
template <class Traits>
struct KeyBiasWriter {
  using Element = typename Traits::Element;
  using Shared = SingleTileShared<Traits>;
  using Columns = typename Traits::KeyBias;
  static constexpr int kStep = Traits::kKeyBiasWarps * tile::kWarpSize;
  static constexpr int kLaneKeys = (Traits::kKeys + kStep - 1) / kStep;

  const SingleTileArguments& args;
  Shared& shared;
  const int warp;
  typename Shared::WorkPipeline::State work_state{};

  __device__ __forceinline__ void run() {
    if (warp == 0 && tile::lane() < 8) shared.key_bias.factors.init(tile::lane());
    const float inverse_scale = 1.0f / static_cast<float>(args.params.score_mod.scale);
    float of_tile[kLaneKeys];
    bool has_tile = false;
    for_each_static_work_tile(args.schedule.num_blocks, [&](int index) {
      WorkTile work_tile;
      locate(work_tile, args, index);
      if (work_tile.query_tiles == 0) return;
      float of_next[kLaneKeys];
      read(of_next, work_tile.coord);
      if (has_tile) write(of_tile, inverse_scale);
      has_tile = true;
#pragma unroll
      for (int i = 0; i < kLaneKeys; ++i) of_tile[i] = of_next[i];
    });
    if (has_tile) write(of_tile, inverse_scale);
  }

 private:
  __device__ __forceinline__ int key_of(int i) const { return warp * tile::kWarpSize + tile::lane() + i * kStep; }

  __device__ __forceinline__ void read(float (&biases)[kLaneKeys], const HeadCoord& coord) const {
    const attention::ScoreMod& mod = args.params.score_mod;
    const attention::BroadcastView& view = mod.mask.present() ? mod.mask : mod.bias;
    const int64_t first = view.offset({coord.sequence.batch, coord.head, 0, 0});
    const auto keys = static_cast<int>(coord.sequence.num_keys);
#pragma unroll
    for (int i = 0; i < kLaneKeys; ++i) {
      biases[i] = -INFINITY;
      if (key_of(i) >= keys) continue;
      const int64_t at = first + key_of(i) * view.key_stride;
      if (mod.mask.present()) {
        if (static_cast<const uint8_t*>(view.data)[at] != 0) biases[i] = 0.0f;
      } else {
        biases[i] = static_cast<float>(static_cast<const Element*>(view.data)[at]);
      }
    }
  }

  __device__ __forceinline__ void write(const float (&biases)[kLaneKeys], float inverse_scale) {
    shared.work_pipeline.consumer_wait(work_state);  // the stage is empty
#pragma unroll
    for (int i = 0; i < kLaneKeys; ++i) {
      if (key_of(i) >= Traits::kKeys) break;
      shared.key_bias.columns[work_state.stage].rows[key_of(i)] = key_bias_column<Columns>(biases[i], inverse_scale);
    }
    ptx::fence_stores();
    __syncwarp();
    if (tile::lane() == 0) {
      ptx::arrive(shared.k_full[work_state.stage]);
      ptx::arrive(shared.work_pipeline.empty[work_state.stage]);
    }
    work_state.advance();
  }
};

}  // namespace flash_attn_ext::sm90
