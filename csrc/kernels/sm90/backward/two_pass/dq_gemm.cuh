// The GEMM dQ = scale * dS K, from the tiles of dS that the score kernel stored. A work tile has a column part of dQ of
// 192 queries of a head.
//
//  Warpgroup 0  Producer: one thread fetches work tiles and issues all copies.
//  The others   64 queries each: sums over the keys that they see, in ascending order, in registers.
//
// It is the GEMM kernel of dK with the roles of queries and keys exchanged: a step has 64 keys, and a warpgroup has a
// materialised tile of its own queries in it, which is read as it is.
#pragma once

#include "kernels/epilogue/store_quads.cuh"
#include "kernels/schedule/block.cuh"
#include "kernels/sm90/backward/partial_sums.cuh"
#include "kernels/sm90/backward/two_pass/traits.h"
#include "kernels/sm90/tile_scheduler.cuh"
#include "ptx/bulk_copy.h"

namespace flash_attn_ext::sm90 {

template <class ElementType, HeadDims kDimsValue>
struct DqGemmTraits {
  using Element = ElementType;
  static constexpr int kRows = MaterialisedTiles::kRows;  // queries of a warpgroup, and keys of a step
  static constexpr GemmTile kTile = gemm_tile(kDimsValue);
  static constexpr int kWarpgroups = kTile.warpgroups;
  static constexpr int kQueries = kWarpgroups * kRows;
  static constexpr int kColumns = kColumnsOfPart;
  static constexpr int kThreads = tile::kWarpgroupSize * (kWarpgroups + 1);

  using LeftTile = tile::SmemTile<Element, kRows, kRows>;      // of dS
  using RightTile = tile::SmemTile<Element, kRows, kColumns>;  // of K
  using Sums = tile::WarpgroupAccumulator<kColumns>;
};

// What the producer tells the consumers about a work tile.
template <int kWarpgroups>
struct DqGemmWork {
  static constexpr int kEnd = -1;

  int batch;  // kEnd: there are no more work tiles
  int head;
  int key_head;
  int head_of_group;
  int query_begin;  // of the sequence
  int key_begin;
  int first_column;
  int tile;   // the first warpgroup's, of MaterialisedTiles::kRows queries
  int begin;  // key tiles [begin, end) that any of the queries sees
  int end;
  TileRange own[kWarpgroups];  // those that the queries of each warpgroup see
  int stored[kWarpgroups];     // each warpgroup's first materialised tile
  // Queries from each warpgroup's first one to the sequence's end. At most 0 where there are none, or where the row of
  // tiles belongs to another launch.
  int rows[kWarpgroups];
  int partial[kWarpgroups];  // each warpgroup's index among query_sums
};

template <class Traits>
struct DqGemmShared {
  static constexpr int kComputingWarps = 4 * Traits::kWarpgroups;
  static constexpr int kWorkStages = 2;
  static constexpr int kStages = Traits::kTile.stages;
  using Work = DqGemmWork<Traits::kWarpgroups>;

  typename Traits::LeftTile left[kStages][Traits::kWarpgroups];
  typename Traits::RightTile right[kStages];
  Work work[kWorkStages];
  tile::PipelineBarriers<kStages> pipeline;
  tile::PipelineBarriers<kWorkStages> work_pipeline;

  __device__ __forceinline__ void init() {
    pipeline.init(kComputingWarps);
    work_pipeline.init(kComputingWarps);
    ptx::fence_barrier_init();
  }
};

template <class Traits>
struct DqGemmProducer {
  using Element = typename Traits::Element;
  using Shared = DqGemmShared<Traits>;
  using Work = typename Shared::Work;

  const TwoPassArguments& args;
  Shared& shared;
  typename decltype(Shared::pipeline)::State state{};
  typename decltype(Shared::work_pipeline)::State work_state{};

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (uint32_t index = blockIdx.x; index < args.schedule.num_blocks; index = fetch_work_tile(args.work_counters)) {
      shared.work_pipeline.producer_acquire(work_state);
      Work& work = shared.work[work_state.stage];
      if (!describe(work, args.schedule.place(index))) continue;
      ptx::arrive(shared.work_pipeline.full[work_state.stage]);
      send(work);
      work_state.advance();
    }
    publish_end(shared.work, shared.work_pipeline, work_state);
  }

 private:
  // Returns false if the launch or the sequence has no such tile.
  __device__ __forceinline__ bool describe(Work& work, const Place& at) const {
    const attention::BackwardParams& p = args.params;
    const attention::Sequence sequence = p.sequences.at(at.batch);
    const auto first = static_cast<int>(first_query_of(args.schedule, at, Traits::kQueries));
    const auto num_queries = static_cast<int>(sequence.num_queries);
    const int first_row = MaterialisedTiles::first_row(p, sequence);
    const int tile = first / Traits::kRows;
    const int begin = args.tiles.begin_of(first_row);  // the query tiles of the launch
    const int end = args.tiles.end_of(first_row);
    if (first >= num_queries || tile + Traits::kWarpgroups <= begin || tile >= end) return false;
    describe_head(work, args.schedule, at, sequence);
    work.first_column = static_cast<int>(at.slice) * Traits::kColumns;
    work.tile = tile;
    const int stored = args.tiles.first_of_head(p, sequence, work.key_head, work.head_of_group);
    const int head_of_launch = args.head_of_launch(sequence, work.key_head, work.head_of_group);
    const SeenTiles seen = SeenTiles::of(p.visibility, sequence, args.tiles);
    TileRange all = {0, 0, 0, 0};
#pragma unroll 1
    for (int w = 0; w < Traits::kWarpgroups; ++w) {
      const int row = first_row + tile + w;
      const bool is_of_launch = tile + w >= begin && tile + w < end;
      const TileRange own = is_of_launch ? seen.keys_of(tile + w) : TileRange{0, 0, 0, 0};
      work.own[w] = own;
      work.rows[w] = is_of_launch ? num_queries - (tile + w) * Traits::kRows : 0;
      work.stored[w] = stored + args.tiles.before(row);
      work.partial[w] = args.tiles.index_of_row(head_of_launch, row) * static_cast<int>(args.schedule.slices.divisor) +
                        static_cast<int>(at.slice);
      all = joined(all, own);
    }
    work.begin = all.begin;
    work.end = all.end;
    return true;
  }

  __device__ __forceinline__ void send(const Work& work) {
    const Element* const dscores = static_cast<const Element*>(args.workspace.scores) + args.tiles.between;
    constexpr int kTileBytes = static_cast<int>(MaterialisedTiles::kBytes);
#pragma unroll 1
    for (int tile = work.begin; tile < work.end; ++tile) {
      shared.pipeline.producer_acquire(state);
      ptx::Barrier& full = shared.pipeline.full[state.stage];
      int count = 0;
#pragma unroll 1
      for (int w = 0; w < Traits::kWarpgroups; ++w) count += sees(work.own[w], tile);
      ptx::arrive_expecting(full, count * kTileBytes + Traits::RightTile::kBytes);
#pragma unroll 1
      for (int w = 0; w < Traits::kWarpgroups; ++w) {
        if (!sees(work.own[w], tile)) continue;
        const int stored = work.stored[w] + tile - work.own[w].begin;
        ptx::copy_bytes(&shared.left[state.stage][w], dscores + MaterialisedTiles::offset(stored), kTileBytes, full);
      }
      shared.right[state.stage].copy(args.k.map, full,
                                     {work.first_column, work.key_begin + tile * Traits::kRows,
                                      work.key_head * args.k.head_step, work.batch * args.k.batch_step});
      state.advance();
    }
  }

  __device__ __forceinline__ static bool sees(const TileRange& own, int tile) {
    return tile >= own.begin && tile < own.end;
  }
};

template <class Traits>
struct DqGemmWarpgroup {
  using Element = typename Traits::Element;
  using Shared = DqGemmShared<Traits>;
  using Work = typename Shared::Work;
  using Sums = typename Traits::Sums;

  const TwoPassArguments& args;
  Shared& shared;
  const int warpgroup;
  typename decltype(Shared::pipeline)::State state{};
  typename decltype(Shared::work_pipeline)::State work_state{};

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (;;) {
      shared.work_pipeline.consumer_wait(work_state);
      const Work& work = shared.work[work_state.stage];
      if (uniform(work.batch) == Work::kEnd) break;
      multiply(work);
      consumer_release(shared.work_pipeline.empty[work_state.stage]);
      work_state.advance();
    }
  }

 private:
  static constexpr int kWarpRows = 16;
  __device__ __forceinline__ static int warp_row() { return tile::warp() % 4 * kWarpRows; }

  __device__ __forceinline__ void multiply(const Work& work) {
    Sums sums;
    PartialSums<Sums>::load(sums, partial_of(work), !args.tiles.begins_keys() && work.rows[warpgroup] > 0);
    const TileRange own = work.own[warpgroup];
    const int iterations = uniform(max(work.end - work.begin, 0));
    const int steps = uniform(max(own.end - own.begin, 0));
    const int before = uniform(steps > 0 ? own.begin - work.begin : iterations);
    drain(before);
#pragma unroll 1
    for (int i = 0; i < steps; ++i) step(sums);
    drain(iterations - before - steps);
    if (work.rows[warpgroup] > 0) {
      if (args.tiles.ends_keys) {
        store(work, sums);
      } else {
        PartialSums<Sums>::store(partial_of(work), sums);
      }
    }
    __syncwarp();  // unless the warp is converged, ptxas keeps no descriptor in uniform registers
  }

  __device__ __forceinline__ float* partial_of(const Work& work) const {
    return args.workspace.query_sums + int64_t{work.partial[warpgroup]} * PartialSums<Sums>::kFloats;
  }

  // 256 columns take two wgmma: ptxas gives one instruction no more registers than a thread has when the kernel starts.
  __device__ __forceinline__ void step(Sums& sums) {
    constexpr int kInstructions = 2;
    constexpr int kTiles = Sums::kColumnTiles / kInstructions;
    state.stage = uniform(state.stage);
    shared.pipeline.consumer_wait(state);
    const auto left = tile::SmemOperand(shared.left[0][0]).after(state.stage * Traits::kWarpgroups + warpgroup);
    const auto right = tile::SmemOperand(shared.right[0]).after(state.stage);
    ptx::pin_registers(sums.c[0]);
    ptx::fence_wgmma();
#pragma unroll
    for (int k = 0; k < Traits::kRows / 16; ++k) {
#pragma unroll
      for (int part = 0; part < kInstructions; ++part) {
        ptx::multiply_by_rows_async(reinterpret_cast<float(&)[kTiles][4]>(sums.c[0][part * kTiles]), left.columns(k),
                                    right.rows(k, part * Traits::RightTile::kChunks / kInstructions), true, Element{});
      }
    }
    ptx::commit_wgmma();
    ptx::wait_wgmma<0>();
    ptx::pin_registers(sums.c[0]);
    release();
  }

  // Drains key tiles that only queries of other warpgroups see.
  __device__ __forceinline__ void drain(int iterations) {
#pragma unroll 1
    for (int i = 0; i < iterations; ++i) {
      shared.pipeline.consumer_wait(state);
      release();
    }
  }

  __device__ __forceinline__ void release() {
    consumer_release(shared.pipeline.empty[state.stage]);
    state.advance();
  }

  __device__ __forceinline__ void store(const Work& work, Sums& sums) const {
    const attention::BackwardParams& p = args.params;
    const int tile = work.tile + warpgroup;
    const int first = tile * Traits::kRows + warp_row();
    const int rows = work.rows[warpgroup] - warp_row();
    if (rows <= 0) return;
    sums.scale(static_cast<float>(p.score_mod.scale));
    const bool needs_recompute = store_row_chunks<Element>(
        {.data = p.dq.row<Element>(work.batch, work.head, work.query_begin + first) + work.first_column,
         .row_stride = p.dq.row_stride,
         .column_stride = p.dq.column_stride,
         .rows = rows,
         .columns = static_cast<int>(p.head_dim_qk) - work.first_column},
        sums);
    if (needs_recompute) args.workspace.dq_nan_flag(p, work, tile, tile::warp() % 4) = 1;
  }
};

}  // namespace flash_attn_ext::sm90
