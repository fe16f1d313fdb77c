// A warpgroup that computes dQ of 64 queries, and stores P and dS for the products that follow:
//
//   S = Q K^T  |  dP = dO V^T, beside it P = exp2(c S - lse)  |  dS = P (dP - delta)
//   dQ += dS K, and S of the next tile of keys, while dS is stored
//
// or, where registers hold it (StoringTile::dp_ahead), dP of the next tile with its S, and dQ beside P of the next one.
#pragma once

#include "kernels/epilogue/store_quads.cuh"
#include "kernels/sm90/backward_storing/query_scores.cuh"
#include "kernels/sm90/backward_storing/stored_pieces.cuh"
#include "kernels/sm90/backward_storing/traits.h"

namespace flash_attn_ext::sm90 {

template <class Traits>
struct QueryWarpgroup {
  using Element = typename Traits::Element;
  using Shared = StoringDqShared<Traits>;
  using Scores = typename Traits::Scores;
  using Where = typename Traits::Where;
  using PackedScores = tile::PackedRows<Traits::kRows>;

  const StoringArguments& args;
  Shared& shared;
  const int warpgroup;
  QueryScores<Traits> score;

  Scores scores;
  Scores gradients;  // dP
  PackedScores p;
  PackedScores dscores;
  tile::WarpgroupAccumulator<Traits::kDims.qk> dq;
  bool is_empty = true;  // dQ
  Element* stored;       // the thread's first 16 bytes of the tile of P, or of the first one that its queries see
  tile::RingPosition<1> q_at{};
  typename decltype(Shared::k_ring)::Position k_at{};
  typename decltype(Shared::v_ring)::Position v_at{};
  typename decltype(Shared::work_ring)::Position work_at{};

  __device__ __forceinline__ void run() {
    dq.clear();
#pragma unroll 1
    for (;;) {
      shared.work_ring.wait_full(work_at);
      const QueryTileWork& work = shared.work[work_at.stage];
      if (uniform(work.batch) == QueryTileWork::kEnd) break;
      differentiate(work);
      store(work);
      release(shared.work_ring.empty[work_at.stage]);
      work_at.advance();
    }
  }

 private:
  static constexpr int kWarpRows = 16;
  static constexpr bool kDpAhead = Traits::kTile.dp_ahead;
  static_assert(!kDpAhead || !(Traits::kSkipsTiles || Traits::kExtended));
  __device__ __forceinline__ static int warp_row() { return tile::warp() % 4 * kWarpRows; }

  // A tile of keys at hand.
  struct Visit {
    int tile;
    bool masked;  // the mask hides some of it
    bool last;    // that any of the block's queries sees
  };

  __device__ __forceinline__ void differentiate(const QueryTileWork& work) {
    is_empty = true;
    if constexpr (kDpAhead) dq.clear();
    const int visits = uniform(work.end - work.begin);
    if (visits <= 0) return;
    if constexpr (Traits::kSkipsTiles) {
      visit_attended(work);
    } else {
      visit_all(work, visits);
    }
    q_at.advance();
  }

  __device__ __forceinline__ void visit_all(const QueryTileWork& work, int visits) {
    // Its own come one after the other; the rest are seen by the other warpgroup's queries only.
    const TileRange own = work.own[warpgroup];
    const int steps = uniform(max(own.end - own.begin, 0));
    const int before = uniform(own.begin - work.begin);
    shared.q_ring[warpgroup].wait_full(q_at);
    if (steps > 0) {
      begin(work, own);
      pass(before);
      start_scores(k_at);
      shared.dout_ring[warpgroup].wait_full(q_at);
      if constexpr (kDpAhead) start_dp();
      ptx::wait_products<0>();
      ptx::pin_registers(scores.c[0]);
      if constexpr (kDpAhead) ptx::pin_registers(gradients.c[0]);
      int tile = uniform(own.begin);
#pragma unroll 1
      for (int i = 1; i < steps; ++i, ++tile) step<true>(work, {tile});
      step<false>(work, {tile, false, true});
      if constexpr (kDpAhead) end_dq();
      pass(visits - before - steps);
    } else {
      release_queries();
      pass(visits);
    }
  }

  // Where a mask may leave tiles out: the producer says of each one who attends it.
  __device__ __forceinline__ void visit_attended(const QueryTileWork& work) {
    bool has_begun = false;
    bool has_queries = true;  // they are not released yet
    for (;;) {
      int word = await_visit(k_at);
      if (word & AttendedVisit::kSeen) {
        shared.q_ring[warpgroup].wait_full(q_at);
        if (!has_begun) begin(work, work.own[warpgroup]);
        has_begun = true;
        prepare(work, visit_of(word));
        start_scores(k_at);
        ptx::wait_products<0>();
        shared.dout_ring[warpgroup].wait_full(q_at);
        ptx::pin_registers(scores.c[0]);
#pragma unroll 1
        while (word & AttendedVisit::kNextSeen) word = step<true>(work, visit_of(word));
        step<false>(work, visit_of(word));
        has_queries = (word & AttendedVisit::kLast) == 0;
      } else {
        pass(1);
      }
      if (word & AttendedVisit::kLast) break;
    }
    if (has_queries) {
      shared.q_ring[warpgroup].wait_full(q_at);
      release_queries();
    }
  }

  __device__ __forceinline__ int await_visit(const typename decltype(Shared::k_ring)::Position& at) {
    shared.k_ring.wait_full(at);
    return uniform(shared.visits[at.stage][warpgroup].word);
  }
  __device__ __forceinline__ static Visit visit_of(int word) {
    const AttendedVisit visit = {word};
    return {visit.tile(), visit.has(AttendedVisit::kMasked), visit.has(AttendedVisit::kLast)};
  }

  // Unread: Q has arrived.
  __device__ __forceinline__ void release_queries() {
    release(shared.q_ring[warpgroup].empty[0]);
    shared.dout_ring[warpgroup].wait_full(q_at);
    release(shared.dout_ring[warpgroup].empty[0]);
  }

  // By all warps that have read what the barrier stands for.
  __device__ __forceinline__ static void release(ptx::Barrier& empty) {
    __syncwarp();
    if (tile::lane() == 0) ptx::arrive(empty);
  }

  __device__ __forceinline__ void begin(const QueryTileWork& work, const TileRange& own) {
    score.begin(work, args.workspace.statistics_of(work.statistics + warpgroup) + warp_row(), first_query(work));
    const int row = warp_row() + Scores::row(0);
    stored = static_cast<Element*>(args.workspace.scores) + ScoreTiles::offset(work.stored[warpgroup]) +
             row * Traits::kRows + (tile::lane() % 4 ^ row % 8) * StoredPieces::kElements;
  }

  // Of the warp's.
  __device__ __forceinline__ int first_query(const QueryTileWork& work) const {
    return (work.tile + warpgroup) * Traits::kRows + warp_row();
  }

  // Calls function(where) with the warp's tile of scores.
  template <class Function>
  __device__ __forceinline__ void in_tile(const QueryTileWork& work, int tile, Function&& function) {
    const attention::Sequence sequence = {work.batch, work.query_begin, work.key_begin, work.num_queries,
                                          work.num_keys};
    const WorkItem item = {sequence, work.head, work.key_head};
    const Where where = {args.params, item, first_query(work), tile * Traits::kRows};
    function(where);
  }

  __device__ __forceinline__ void prepare(const QueryTileWork& work, const Visit& visit) {
    in_tile(work, visit.tile, [&](const Where& where) { score.prepare(where, visit.masked); });
  }

  // Returns what comes next, where a mask may leave tiles out.
  template <bool kHasNext>
  __device__ __forceinline__ int step(const QueryTileWork& work, Visit visit) {
    k_at.stage = uniform(k_at.stage);
    v_at.stage = uniform(v_at.stage);
    if constexpr (kHasNext) visit.last = false;
    if (visit.last) release(shared.q_ring[warpgroup].empty[0]);
    if constexpr (kDpAhead) return step_ahead<kHasNext>(work, visit);
    if constexpr (Traits::kExtended) {
      differentiate_any(work, visit);
    } else {
      differentiate_ahead(work, visit);
    }
    start_dq();
    auto next = k_at;
    next.advance();
    int word = 0;
    if constexpr (kHasNext) {
      if constexpr (Traits::kSkipsTiles) word = await_visit(next);
      start_scores(next);
      if constexpr (Traits::kSkipsTiles) prepare(work, visit_of(word));
    }
    Element* to = stored;
    if constexpr (Traits::kSkipsTiles) to += int64_t{visit.tile - work.own[warpgroup].begin} * ScoreTiles::kElements;
    StoredPieces::store(p, to);
    StoredPieces::store(dscores, to + args.tiles.between);
    if constexpr (!Traits::kSkipsTiles) stored += ScoreTiles::kElements;
    ptx::wait_products<0>();
    ptx::pin_registers(scores.c[0]);
    ptx::pin_registers(dq.c[0]);
    is_empty = false;
    release(shared.k_ring.empty[k_at.stage]);
    k_at = next;
    return word;
  }

  // The same where dP of the next tile is started with its S, and dQ behind both: P is computed while dQ of the tile
  // before is in flight.
  template <bool kHasNext>
  __device__ __forceinline__ int step_ahead(const QueryTileWork& work, const Visit& visit) {
    hide(work, visit);
    score.exponentiate(scores, p, visit.masked);
    StoredPieces::store(p, stored);
    end_dq();
    await_dp(visit);
    v_at.stage = uniform(v_at.stage);
    score.differentiate(scores, gradients, dscores);
    const auto at = k_at;
    k_at.advance();
    k_at.stage = uniform(k_at.stage);
    if constexpr (kHasNext) {
      start_scores(k_at);
      start_dp();
    }
    tile::start_product(dq, dscores, tile::BoxOperand(shared.k[0]).after(at.stage), true);
    StoredPieces::store(dscores, stored + args.tiles.between);
    stored += ScoreTiles::kElements;
    if constexpr (kHasNext) {
      ptx::wait_products<1>();
      ptx::pin_registers(scores.c[0]);
      ptx::pin_registers(gradients.c[0]);
    }
    is_empty = false;
    return 0;
  }

  // dQ of the tile before, if there is one.
  __device__ __forceinline__ void end_dq() {
    ptx::wait_products<0>();
    ptx::pin_registers(dq.c[0]);
    __syncwarp();
    const int stage = k_at.stage == 0 ? Traits::kTile.key_stages - 1 : k_at.stage - 1;
    if (!is_empty && tile::lane() == 0) ptx::arrive(shared.k_ring.empty[stage]);
  }

  __device__ __forceinline__ void hide(const QueryTileWork& work, const Visit& visit) {
    if (!work.own[warpgroup].full(visit.tile)) {
      in_tile(work, visit.tile, [&](const Where& where) { where.hide_invisible(scores); });
    }
    __syncwarp();
  }

  // P while dP is on its way, and dS.
  __device__ __forceinline__ void differentiate_ahead(const QueryTileWork& work, const Visit& visit) {
    hide(work, visit);
    start_dp();
    if constexpr (Traits::kHasBoxes) score.bias = &shared.bias[k_at.stage][warpgroup];
    score.exponentiate(scores, p, visit.masked);
    await_dp(visit);
    score.differentiate(scores, gradients, dscores);
  }

  // Both at once.
  __device__ __forceinline__ void differentiate_any(const QueryTileWork& work, const Visit& visit) {
    start_dp();
    await_dp(visit);
    score.terms.await();
    in_tile(work, visit.tile, [&](const Where& where) {
      if (work.own[warpgroup].full(visit.tile)) {
        score.template differentiate<false>(scores, gradients, where, visit.masked);
      } else {
        score.template differentiate<true>(scores, gradients, where, visit.masked);
      }
    });
    p.pack(scores, Element{});
    dscores.pack(gradients, Element{});
    __syncwarp();
  }

  __device__ __forceinline__ void await_dp(const Visit& visit) {
    ptx::wait_products<0>();
    ptx::pin_registers(gradients.c[0]);
    release(shared.v_ring.empty[v_at.stage]);
    if (visit.last) release(shared.dout_ring[warpgroup].empty[0]);
    v_at.advance();
  }

  __device__ __forceinline__ void start_scores(const typename decltype(Shared::k_ring)::Position& at) {
    shared.k_ring.wait_full(at);
    tile::start_rows_product(scores, tile::BoxOperand(shared.q[0]).after(warpgroup),
                             tile::BoxOperand(shared.k[0]).after(at.stage));
  }
  __device__ __forceinline__ void start_dp() {
    shared.v_ring.wait_full(v_at);
    tile::start_rows_product(gradients, tile::BoxOperand(shared.dout[0]).after(warpgroup),
                             tile::BoxOperand(shared.v[0]).after(v_at.stage));
  }
  __device__ __forceinline__ void start_dq() {
    tile::start_product(dq, dscores, tile::BoxOperand(shared.k[0]).after(k_at.stage), !is_empty);
  }

  // Tiles of keys that only the other warpgroup's queries see.
  __device__ __forceinline__ void pass(int visits) {
#pragma unroll 1
    for (int i = 0; i < visits; ++i) {
      shared.k_ring.wait_full(k_at);
      shared.v_ring.wait_full(v_at);
      release(shared.k_ring.empty[k_at.stage]);
      release(shared.v_ring.empty[v_at.stage]);
      k_at.advance();
      v_at.advance();
    }
  }

  __device__ __forceinline__ void store(const QueryTileWork& work) {
    const attention::BackwardParams& params = args.params;
    const int first = first_query(work);
    const int rows = work.num_queries - first;
    if (is_empty) dq.clear();
    dq.scale(static_cast<float>(params.score_mod.scale));
    const bool suspicious =
        rows > 0 &&
        store_row_chunks<Element>({.data = params.dq.row<Element>(work.batch, work.head, work.query_begin + first),
                                   .row_stride = params.dq.row_stride,
                                   .column_stride = params.dq.column_stride,
                                   .rows = rows,
                                   .columns = static_cast<int>(params.head_dim_qk)},
                                  dq);
    if (suspicious) args.workspace.dq_nan_flag(params, work, work.tile + warpgroup, tile::warp() % 4) = 1;
    __syncwarp();  // converged: else ptxas keeps no descriptor in uniform registers
  }
};

}  // namespace flash_attn_ext::sm90
