// The dQ warpgroup: it computes the partial dQ / scale = dS K of each iteration, from dS in shared memory, where the
// key warpgroups store it. The scale is applied where dQ is written. With dropout it also draws which weights are kept.
#pragma once

#include "kernels/epilogue/store_quads.cuh"
#include "kernels/sm90/backward/key_stationary/dq_epilogue.cuh"
#include "kernels/sm90/backward/key_stationary/dscore_keys.cuh"
#include "kernels/sm90/backward/key_stationary/traits.h"

namespace flash_attn_ext::sm90 {

template <class Traits>
struct DqWarpgroup {
  using Element = typename Traits::Element;
  using Shared = KeyStationaryShared<Traits>;
  using Work = typename Traits::Work;
  static constexpr int kColumns = Traits::kConfig.tile.dq_columns;
  using Dq = tile::WarpgroupAccumulator<kColumns>;

  const KeyStationaryArguments& args;
  Shared& shared;
  typename decltype(Shared::k_pipeline)::State k_state{};
  typename Shared::QueryState dscore_state{};
  typename Shared::QueryState draw_state{};  // the next iteration whose dropout is drawn
  int seed[2] = {};                          // of dropout
  DqEpilogue<Traits> dq_epilogue{args, shared};
  typename decltype(Shared::work_pipeline)::State work_state{};

  __device__ __forceinline__ void run() {
    if constexpr (Traits::kDrops) {
      const auto bits = static_cast<uint64_t>(*args.params.dropout.seed);
      seed[0] = static_cast<int>(bits);
      seed[1] = static_cast<int>(bits >> 32);
    }
#pragma unroll 1
    for (;;) {
      shared.work_pipeline.consumer_wait(work_state);
      const Work& work = shared.work[work_state.stage];
      if (uniform(work.batch) == KeyTileWork::kEnd) break;
      const int iterations = uniform(work.iterations);
      // Dropout is drawn as many iterations ahead as there are stages, but never for the next key tile. The copies for
      // that tile may have to wait until other CTAs make progress, and these wait for what this CTA still has to add.
      if (!Traits::kDrops || iterations == 0) shared.k_pipeline.consumer_wait(k_state);
#pragma unroll 1
      for (int i = Traits::kDrops ? -Shared::kStages : 0; i < iterations; ++i) {
        if (Traits::kDrops && i == 0) shared.k_pipeline.consumer_wait(k_state);
        if (i >= 0) add(work, shared.iteration(dscore_state));
        if constexpr (Traits::kDrops) {
          if (i + Shared::kStages < iterations) draw(work);
        }
      }
      __syncwarp();
      if (tile::lane() == 0) {
        if (iterations == 0) ptx::arrive(shared.k_pipeline.empty[k_state.stage]);
        ptx::arrive(shared.work_pipeline.empty[work_state.stage]);
      }
      k_state.advance();
      work_state.advance();
    }
    dq_epilogue.end();
  }

 private:
  __device__ __forceinline__ void add(const Work& work, const QueryIteration& at) {
    shared.dscore_pipeline.consumer_wait(dscore_state);
    if constexpr (Traits::kConfig.pre_signals_dq) {
      // The GEMM of dQ is issued when the key warpgroups have completed dK of this iteration and S of the next one,
      // because more work waits for those. It then overlaps the exponentials of the key warpgroups. In a key tile's
      // last iteration it is issued at once, because it releases the stage that K of the next key tile needs. The code
      // selects a barrier instead of branching, because ptxas keeps no descriptor in uniform registers after a branch.
      ptx::Barrier& awaited =
          (at.ends_tile ? shared.dscore_pipeline.full : shared.q_pipeline.empty)[dscore_state.stage];
      ptx::wait(awaited, dscore_state.parity);
    }
    Dq dq;
    issue_slice_gemm(dq, 0);
    // This overlaps with the GEMM.
    const int accumulator = uniform(at.accumulator);
    const int rank = uniform(at.rank);
    const bool is_last = uniform(at.is_last) != 0;
    const bool ends_tile = uniform(at.ends_tile) != 0;
    const int query_tile = uniform(at.query_tile);
    const int head = uniform(at.head);
    dq_epilogue.begin(accumulator, rank, is_last);
#pragma unroll 1
    for (int slice = 0;;) {
      dq_epilogue.begin_slice(accumulator, rank, slice, is_last);
      ptx::wait_wgmma<0>();
      ptx::pin_registers(dq.c[0]);
      __syncwarp();
      if (slice + 1 == Traits::kDqSlices && tile::lane() == 0) {
        if constexpr (!Traits::kDrops) ptx::arrive(shared.dscore_pipeline.empty[dscore_state.stage]);
        if (ends_tile) ptx::arrive(shared.k_pipeline.empty[k_state.stage]);
      }
      if (is_last) {
        dq_epilogue.add_sums(dq, accumulator, rank, slice);
        store(dq, work, query_tile, head, slice);
      } else {
        dq_epilogue.store_partial(dq, slice);
      }
      __syncwarp();
      if (++slice == Traits::kDqSlices) break;
      issue_slice_gemm(dq, slice);
    }
    dq_epilogue.finish(accumulator, rank, is_last);
    dscore_state.advance();
  }

  // Draws dropout of a later iteration, for which the warpgroup has emptied the stage.
  __device__ __forceinline__ void draw(const KeyTileWork& work) {
    shared.q_pipeline.consumer_wait(draw_state);
    const QueryIteration& at = shared.iteration(draw_state);
    const int warp = tile::warp() % 4;
    uint32_t words[2];
    // The pinned seed is in ordinary registers, of which more are left than of uniform ones.
    const uint64_t own_seed =
        static_cast<uint32_t>(ptx::pin(seed[0])) | uint64_t{static_cast<uint32_t>(ptx::pin(seed[1]))} << 32;
    DropoutDraws<Traits>{args.params.dropout, own_seed}.draw(words,
                                                             {.batch = uniform(work.batch),
                                                              .head = uniform(at.head),
                                                              .key_tile = uniform(work.contributor.tile),
                                                              .query_tile = uniform(at.query_tile)},
                                                             warp);
    sync_dq_warpgroup();  // no GEMM reads the stage any more
    for (int i = 0; i < 2; ++i) {
      ptx::store_shared(address_of_draws(shared, draw_state.stage, 2 * warp + i), words[i]);
    }
    __syncwarp();
    if (tile::lane() == 0) ptx::arrive(shared.dscore_pipeline.empty[draw_state.stage]);
    draw_state.advance();
  }

  __device__ __forceinline__ void issue_slice_gemm(Dq& dq, int slice) const {
    tile::issue_columns_gemm<kColumns>(dq, tile::SmemOperand(shared.dscores[0]).after(dscore_state.stage),
                                       tile::SmemOperand(shared.k[0]).after(k_state.stage), slice);
  }

  __device__ __forceinline__ void store(Dq& dq, const Work& work, int query_tile, int head, int slice) const {
    const attention::BackwardParams& p = args.params;
    const int first_row = query_tile * Traits::kQueries + tile::warp() % 4 * 16;
    dq.scale(args.gradient_scale);
    Element* const target =
        p.dq.row<Element>(work.batch, head, work.query_begin + first_row) + slice * kColumns * p.dq.column_stride;
    const bool needs_recompute =
        store_row_chunks<Element>({.data = target,
                                   .row_stride = p.dq.row_stride,
                                   .column_stride = p.dq.column_stride,
                                   .rows = work.contributor.num_queries - first_row,
                                   .columns = static_cast<int>(p.head_dim_qk) - slice * kColumns},
                                  dq);
    const QueryTile of_sequence = {work.batch, head, query_tile + first_query_tile_of(work)};
    if (needs_recompute) args.workspace.dq_nan_flag(p, of_sequence, tile::warp() % 4) = 1;
  }
  __device__ __forceinline__ static int first_query_tile_of(const Work& work) {
    if constexpr (Traits::kChunked) {
      return work.first_query_tile;
    } else {
      return 0;
    }
  }
};

}  // namespace flash_attn_ext::sm90
