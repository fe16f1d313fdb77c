// A consumer warpgroup of the dQ kernel: it computes dQ of 64 queries, and stores P and dS for the GEMM kernel. In each
// key tile:
//
//   S = Q K^T  |  dP = dO V^T, beside it P = exp2(c S - lse)  |  dS = P (dP - delta)
//   dQ += dS K, and S of the next key tile, while P and dS are stored
//
// Where registers suffice (TwoPassConfig::dp_ahead), dP of the next tile is issued with its S, and the GEMM of dQ
// overlaps P of the next tile.
#pragma once

#include "kernels/epilogue/store_quads.cuh"
#include "kernels/schedule/materialised_tiles.h"
#include "kernels/sm90/backward/partial_sums.cuh"
#include "kernels/sm90/backward/two_pass/query_scores.cuh"
#include "kernels/sm90/backward/two_pass/stored_chunks.cuh"
#include "kernels/sm90/backward/two_pass/traits.h"
#include "tile/sm90/gemm.h"

namespace flash_attn_ext::sm90 {

template <class Traits>
struct QueryWarpgroup {
  using Element = typename Traits::Element;
  using Shared = TwoPassDqShared<Traits>;
  using Scores = typename Traits::Scores;
  using Where = typename Traits::Where;
  using PackedScores = tile::PackedRows<Traits::kRows>;
  using Sums = tile::WarpgroupAccumulator<Traits::kDims.qk>;

  const TwoPassArguments& args;
  Shared& shared;
  const int warpgroup;
  QueryScores<Traits> score;

  Scores scores;
  Scores gradients;  // dP
  PackedScores p;
  PackedScores dscores;
  Sums dq;
  bool is_empty = true;  // whether dQ has no sums of this work tile yet
  Element* stored;  // the thread's first 16 bytes of the next tile of P, or with masks of the first one its queries see
  tile::PipelineState<1> q_state{};
  typename decltype(Shared::k_pipeline)::State k_state{};
  typename decltype(Shared::v_pipeline)::State v_state{};
  typename decltype(Shared::work_pipeline)::State work_state{};

  __device__ __forceinline__ void run() {
    dq.clear();
#pragma unroll 1
    for (;;) {
      shared.work_pipeline.consumer_wait(work_state);
      const QueryTileWork& work = shared.work[work_state.stage];
      if (uniform(work.batch) == QueryTileWork::kEnd) break;
      differentiate(work);
      store(work);
      consumer_release(shared.work_pipeline.empty[work_state.stage]);
      work_state.advance();
    }
  }

 private:
  static constexpr int kWarpRows = 16;
  static constexpr bool kDpAhead = Traits::kConfig.dp_ahead;
  static_assert(!kDpAhead || !(Traits::kSkipsTiles || Traits::kGeneric));
  __device__ __forceinline__ static int warp_row() { return tile::warp() % 4 * kWarpRows; }

  // The current key tile.
  struct CurrentTile {
    int tile;
    bool masked;  // the mask hides some of it
    bool last;    // the last one that any of the CTA's queries sees
  };

  __device__ __forceinline__ void differentiate(const QueryTileWork& work) {
    is_empty = true;
    if constexpr (Traits::kKeyChunks) {
      PartialSums<Sums>::load(dq, sums_of(work), !args.tiles.begins_keys());
    } else if constexpr (kDpAhead) {
      dq.clear();
    }
    const int iterations = uniform(work.end - work.begin);
    if (iterations <= 0) return;
    if constexpr (Traits::kSkipsTiles) {
      iterate_unmasked(work);
    } else {
      iterate_all(work, iterations);
    }
    q_state.advance();
  }

  __device__ __forceinline__ void iterate_all(const QueryTileWork& work, int iterations) {
    // The key tiles that this warpgroup's queries see are consecutive. Only the other warpgroup's queries see the
    // others.
    const TileRange own = work.own[warpgroup];
    const int steps = uniform(max(own.end - own.begin, 0));
    const int before = uniform(own.begin - work.begin);
    shared.q_pipeline[warpgroup].consumer_wait(q_state);
    if (steps > 0) {
      begin(work, own);
      drain(before);
      issue_qk_gemm(k_state);
      shared.dout_pipeline[warpgroup].consumer_wait(q_state);
      if constexpr (kDpAhead) issue_dp_gemm();
      ptx::wait_wgmma<0>();
      ptx::pin_registers(scores.c[0]);
      if constexpr (kDpAhead) ptx::pin_registers(gradients.c[0]);
      int tile = uniform(own.begin);
#pragma unroll 1
      for (int i = 1; i < steps; ++i, ++tile) step<true>(work, {tile});
      step<false>(work, {tile, false, true});
      if constexpr (kDpAhead) end_dq();
      drain(iterations - before - steps);
    } else {
      release_queries();
      drain(iterations);
    }
  }

  // Iterates over the tiles that a mask leaves. The producer says for each of them which warpgroups attend it.
  __device__ __forceinline__ void iterate_unmasked(const QueryTileWork& work) {
    bool has_begun = false;
    bool has_queries = true;  // Q and dO are not released yet
    for (;;) {
      int word = await_iteration(k_state);
      if (word & UnmaskedIteration::kSeen) {
        shared.q_pipeline[warpgroup].consumer_wait(q_state);
        if (!has_begun) begin(work, work.own[warpgroup]);
        has_begun = true;
        prepare(work, iteration_of(word));
        issue_qk_gemm(k_state);
        ptx::wait_wgmma<0>();
        shared.dout_pipeline[warpgroup].consumer_wait(q_state);
        ptx::pin_registers(scores.c[0]);
#pragma unroll 1
        while (word & UnmaskedIteration::kNextSeen) word = step<true>(work, iteration_of(word));
        step<false>(work, iteration_of(word));
        has_queries = (word & UnmaskedIteration::kLast) == 0;
      } else {
        drain(1);
      }
      if (word & UnmaskedIteration::kLast) break;
    }
    if (has_queries) {
      shared.q_pipeline[warpgroup].consumer_wait(q_state);
      release_queries();
    }
  }

  __device__ __forceinline__ int await_iteration(const typename decltype(Shared::k_pipeline)::State& state) {
    shared.k_pipeline.consumer_wait(state);
    return uniform(shared.iterations[state.stage][warpgroup].word);
  }
  __device__ __forceinline__ static CurrentTile iteration_of(int word) {
    const UnmaskedIteration iteration = {word};
    return {iteration.tile(), iteration.has(UnmaskedIteration::kMasked), iteration.has(UnmaskedIteration::kLast)};
  }

  // Releases Q and dO unread. The caller has waited for Q.
  __device__ __forceinline__ void release_queries() {
    consumer_release(shared.q_pipeline[warpgroup].empty[0]);
    shared.dout_pipeline[warpgroup].consumer_wait(q_state);
    consumer_release(shared.dout_pipeline[warpgroup].empty[0]);
  }

  __device__ __forceinline__ void begin(const QueryTileWork& work, const TileRange& own) {
    score.begin(args.workspace.statistics_of(work.statistics + warpgroup) + warp_row());
    const int row = warp_row() + Scores::row(0);
    stored = static_cast<Element*>(args.workspace.scores) + MaterialisedTiles::offset(work.stored[warpgroup]) +
             row * Traits::kRows + (tile::lane() % 4 ^ row % 8) * StoredChunks::kElements;
  }

  __device__ __forceinline__ float* sums_of(const QueryTileWork& work) const {
    return args.workspace.query_sums + int64_t{work.sums + warpgroup} * PartialSums<Sums>::kFloats;
  }

  // The first query of the warp.
  __device__ __forceinline__ int first_query(const QueryTileWork& work) const {
    return (work.tile + warpgroup) * Traits::kRows + warp_row();
  }

  // Calls function(where) with the warp's tile of scores.
  template <class Function>
  __device__ __forceinline__ void in_tile(const QueryTileWork& work, int tile, Function&& function) {
    const attention::Sequence sequence = {work.batch, work.query_begin, work.key_begin, work.num_queries,
                                          work.num_keys};
    const HeadCoord coord = {sequence, work.head, work.key_head};
    const Where where = {args.params, coord, first_query(work), tile * Traits::kRows};
    function(where);
  }

  __device__ __forceinline__ void prepare(const QueryTileWork& work, const CurrentTile& iteration) {
    in_tile(work, iteration.tile, [&](const Where& where) { score.prepare(where, iteration.masked); });
  }

  // Returns the word of the next tile's UnmaskedIteration, where a mask may hide whole tiles.
  template <bool kHasNext>
  __device__ __forceinline__ int step(const QueryTileWork& work, CurrentTile iteration) {
    k_state.stage = uniform(k_state.stage);
    v_state.stage = uniform(v_state.stage);
    if constexpr (kHasNext) iteration.last = false;
    if (iteration.last) consumer_release(shared.q_pipeline[warpgroup].empty[0]);
    if constexpr (kDpAhead) return step_ahead<kHasNext>(work, iteration);
    if constexpr (Traits::kGeneric) {
      differentiate_any(work, iteration);
    } else {
      differentiate_ahead(work, iteration);
    }
    issue_dq_gemm();
    auto next = k_state;
    next.advance();
    int word = 0;
    if constexpr (kHasNext) {
      if constexpr (Traits::kSkipsTiles) word = await_iteration(next);
      issue_qk_gemm(next);
      if constexpr (Traits::kSkipsTiles) prepare(work, iteration_of(word));
    }
    Element* to = stored;
    if constexpr (Traits::kSkipsTiles)
      to += int64_t{iteration.tile - work.own[warpgroup].begin} * MaterialisedTiles::kElements;
    StoredChunks::store(p, to);
    StoredChunks::store(dscores, to + args.tiles.between);
    if constexpr (!Traits::kSkipsTiles) stored += MaterialisedTiles::kElements;
    ptx::wait_wgmma<0>();
    ptx::pin_registers(scores.c[0]);
    ptx::pin_registers(dq.c[0]);
    is_empty = false;
    consumer_release(shared.k_pipeline.empty[k_state.stage]);
    k_state = next;
    return word;
  }

  // The same where dP of the next tile is issued with its S, and dQ after both. P is computed while dQ of the previous
  // tile is in flight.
  template <bool kHasNext>
  __device__ __forceinline__ int step_ahead(const QueryTileWork& work, const CurrentTile& iteration) {
    hide(work, iteration);
    score.exponentiate(scores, p, iteration.masked);
    StoredChunks::store(p, stored);
    end_dq();
    await_dp(iteration);
    v_state.stage = uniform(v_state.stage);
    score.differentiate(scores, gradients, dscores);
    const auto state = k_state;
    k_state.advance();
    k_state.stage = uniform(k_state.stage);
    if constexpr (kHasNext) {
      issue_qk_gemm(k_state);
      issue_dp_gemm();
    }
    tile::issue_gemm(dq, dscores, tile::SmemOperand(shared.k[0]).after(state.stage), true);
    StoredChunks::store(dscores, stored + args.tiles.between);
    stored += MaterialisedTiles::kElements;
    if constexpr (kHasNext) {
      ptx::wait_wgmma<1>();
      ptx::pin_registers(scores.c[0]);
      ptx::pin_registers(gradients.c[0]);
    }
    is_empty = false;
    return 0;
  }

  // Waits for dQ of the previous tile, if there is one, and releases its K.
  __device__ __forceinline__ void end_dq() {
    ptx::wait_wgmma<0>();
    ptx::pin_registers(dq.c[0]);
    __syncwarp();
    const int stage = k_state.stage == 0 ? Traits::kConfig.k_stages - 1 : k_state.stage - 1;
    if (!is_empty && tile::lane() == 0) ptx::arrive(shared.k_pipeline.empty[stage]);
  }

  __device__ __forceinline__ void hide(const QueryTileWork& work, const CurrentTile& iteration) {
    if (!work.own[warpgroup].full(iteration.tile)) {
      in_tile(work, iteration.tile, [&](const Where& where) { where.hide_invisible(scores); });
    }
    __syncwarp();
  }

  // Computes P while the GEMM of dP is in flight, and then dS.
  __device__ __forceinline__ void differentiate_ahead(const QueryTileWork& work, const CurrentTile& iteration) {
    hide(work, iteration);
    issue_dp_gemm();
    if constexpr (Traits::kHasBoxes) score.bias = &shared.bias[k_state.stage][warpgroup];
    score.exponentiate(scores, p, iteration.masked);
    await_dp(iteration);
    score.differentiate(scores, gradients, dscores);
  }

  // Computes P and dS together, when dP is complete.
  __device__ __forceinline__ void differentiate_any(const QueryTileWork& work, const CurrentTile& iteration) {
    issue_dp_gemm();
    await_dp(iteration);
    score.bias_mask.await();
    in_tile(work, iteration.tile, [&](const Where& where) {
      if (work.own[warpgroup].full(iteration.tile)) {
        score.template differentiate<false>(scores, gradients, where, iteration.masked);
      } else {
        score.template differentiate<true>(scores, gradients, where, iteration.masked);
      }
    });
    p.pack(scores, Element{});
    dscores.pack(gradients, Element{});
    __syncwarp();
  }

  __device__ __forceinline__ void await_dp(const CurrentTile& iteration) {
    ptx::wait_wgmma<0>();
    ptx::pin_registers(gradients.c[0]);
    consumer_release(shared.v_pipeline.empty[v_state.stage]);
    if (iteration.last) consumer_release(shared.dout_pipeline[warpgroup].empty[0]);
    v_state.advance();
  }

  __device__ __forceinline__ void issue_qk_gemm(const typename decltype(Shared::k_pipeline)::State& state) {
    shared.k_pipeline.consumer_wait(state);
    tile::issue_rows_gemm(scores, tile::SmemOperand(shared.q[0]).after(warpgroup),
                          tile::SmemOperand(shared.k[0]).after(state.stage));
  }
  __device__ __forceinline__ void issue_dp_gemm() {
    shared.v_pipeline.consumer_wait(v_state);
    tile::issue_rows_gemm(gradients, tile::SmemOperand(shared.dout[0]).after(warpgroup),
                          tile::SmemOperand(shared.v[0]).after(v_state.stage));
  }
  __device__ __forceinline__ void issue_dq_gemm() {
    tile::issue_gemm(dq, dscores, tile::SmemOperand(shared.k[0]).after(k_state.stage), Traits::kKeyChunks || !is_empty);
  }

  // Drains key tiles that only the other warpgroup's queries see.
  __device__ __forceinline__ void drain(int iterations) {
#pragma unroll 1
    for (int i = 0; i < iterations; ++i) {
      shared.k_pipeline.consumer_wait(k_state);
      shared.v_pipeline.consumer_wait(v_state);
      consumer_release(shared.k_pipeline.empty[k_state.stage]);
      consumer_release(shared.v_pipeline.empty[v_state.stage]);
      k_state.advance();
      v_state.advance();
    }
  }

  __device__ __forceinline__ void store(const QueryTileWork& work) {
    const attention::BackwardParams& params = args.params;
    const int first = first_query(work);
    const int rows = work.num_queries - first;
    if constexpr (Traits::kKeyChunks) {
      if (!args.tiles.ends_keys) {
        PartialSums<Sums>::store(sums_of(work), dq);
        __syncwarp();
        return;
      }
    } else if (is_empty) {
      dq.clear();
    }
    dq.scale(static_cast<float>(params.score_mod.scale));
    const bool needs_recompute =
        rows > 0 &&
        store_row_chunks<Element>({.data = params.dq.row<Element>(work.batch, work.head, work.query_begin + first),
                                   .row_stride = params.dq.row_stride,
                                   .column_stride = params.dq.column_stride,
                                   .rows = rows,
                                   .columns = static_cast<int>(params.head_dim_qk)},
                                  dq);
    if (needs_recompute) args.workspace.dq_nan_flag(params, work, work.tile + warpgroup, tile::warp() % 4) = 1;
    __syncwarp();  // unless the warp is converged, ptxas keeps no descriptor in uniform registers
  }
};

}  // namespace flash_attn_ext::sm90
