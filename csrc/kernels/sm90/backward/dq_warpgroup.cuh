// The warpgroup that computes dQ = scale * dS K of each visit, from dS that the others leave in shared memory. With
// dropout it draws which weights they keep, too.
#pragma once

#include "kernels/epilogue/store_quads.cuh"
#include "kernels/sm90/backward/dq_outlet.cuh"
#include "kernels/sm90/backward/kept_scores.cuh"
#include "kernels/sm90/backward/traits.h"

namespace flash_attn_ext::sm90 {

template <class Traits>
struct DqWarpgroup {
  using Element = typename Traits::Element;
  using Shared = BackwardShared<Traits>;
  static constexpr int kColumns = Traits::kTile.dq_columns;
  using Dq = tile::WarpgroupAccumulator<kColumns>;

  const BackwardArguments& args;
  Shared& shared;
  typename decltype(Shared::k_ring)::Position k_at{};
  typename Shared::Stage dscore_at{};
  typename Shared::Stage draw_at{};  // where dropout is drawn next
  int seed[2] = {};                  // of dropout
  DqOutlet<Traits> outlet{args, shared};
  typename decltype(Shared::work_ring)::Position work_at{};

  __device__ __forceinline__ void run() {
    if constexpr (Traits::kDrops) {
      const auto bits = static_cast<uint64_t>(*args.params.dropout.seed);
      seed[0] = static_cast<int>(bits);
      seed[1] = static_cast<int>(bits >> 32);
    }
#pragma unroll 1
    for (;;) {
      shared.work_ring.wait_full(work_at);
      const KeyTileWork& work = shared.work[work_at.stage];
      if (uniform(work.batch) == KeyTileWork::kEnd) break;
      const int visits = uniform(work.visits);
      // Draws are as many visits ahead as there are stages, but not in the next tile of keys: that may not come before
      // other blocks have gone on, which wait for what this one still has to add.
      if (!Traits::kDrops || visits == 0) shared.k_ring.wait_full(k_at);
#pragma unroll 1
      for (int i = Traits::kDrops ? -Shared::kStages : 0; i < visits; ++i) {
        if (Traits::kDrops && i == 0) shared.k_ring.wait_full(k_at);
        if (i >= 0) add(work, shared.visit(dscore_at));
        if constexpr (Traits::kDrops) {
          if (i + Shared::kStages < visits) draw(work);
        }
      }
      __syncwarp();
      if (tile::lane() == 0) {
        if (visits == 0) ptx::arrive(shared.k_ring.empty[k_at.stage]);
        ptx::arrive(shared.work_ring.empty[work_at.stage]);
      }
      k_at.advance();
      work_at.advance();
    }
    outlet.end();
  }

 private:
  __device__ __forceinline__ void add(const KeyTileWork& work, const Visit& at) {
    shared.dscore_ring.wait_full(dscore_at);
    if constexpr (Traits::kAnnouncesVisits) {
      // After dK of the visit and S of the next one, for which more waits: beside exponentials then. But at a tile's
      // end the next tile's K waits for dQ. (A barrier is chosen, not whether to wait: after a branch ptxas keeps no
      // descriptor in uniform registers.)
      ptx::Barrier& awaited = (at.ends_tile ? shared.dscore_ring.full : shared.q_ring.empty)[dscore_at.stage];
      ptx::wait(awaited, dscore_at.parity);
    }
    Dq dq;
    start(dq, 0);
    // While the product is in flight.
    const int sums = uniform(at.sums);
    const int place = uniform(at.place);
    const bool is_last = uniform(at.is_last) != 0;
    const bool ends_tile = uniform(at.ends_tile) != 0;
    const int query_tile = uniform(at.query_tile);
    const int head = uniform(at.head);
    outlet.begin(sums, place, is_last);
#pragma unroll 1
    for (int piece = 0;;) {
      outlet.begin_piece(sums, place, piece, is_last);
      ptx::wait_products<0>();
      ptx::pin_registers(dq.c[0]);
      __syncwarp();
      if (piece + 1 == Traits::kDqPieces && tile::lane() == 0) {
        if constexpr (!Traits::kDrops) ptx::arrive(shared.dscore_ring.empty[dscore_at.stage]);
        if (ends_tile) ptx::arrive(shared.k_ring.empty[k_at.stage]);
      }
      if (is_last) {
        outlet.add_sums(dq, sums, place, piece);
        store(dq, work, query_tile, head, piece);
      } else {
        outlet.leave(dq, piece);
      }
      __syncwarp();
      if (++piece == Traits::kDqPieces) break;
      start(dq, piece);
    }
    outlet.finish(sums, place, is_last);
    dscore_at.advance();
  }

  // The next visit's, into its stage of dS, which the warpgroup has emptied.
  __device__ __forceinline__ void draw(const KeyTileWork& work) {
    shared.q_ring.wait_full(draw_at);
    const Visit& at = shared.visit(draw_at);
    const int warp = tile::warp() % 4;
    uint32_t words[2];
    // Where it is pinned it is in ordinary registers, of which more are left than of uniform ones.
    const uint64_t own_seed =
        static_cast<uint32_t>(ptx::pin(seed[0])) | uint64_t{static_cast<uint32_t>(ptx::pin(seed[1]))} << 32;
    DropoutDraws<Traits>{args.params.dropout, own_seed}.draw(words,
                                                             {.batch = uniform(work.batch),
                                                              .head = uniform(at.head),
                                                              .key_tile = uniform(work.visitor.tile),
                                                              .query_tile = uniform(at.query_tile)},
                                                             warp);
    meet_dq_warpgroup();  // no product reads the stage any more
    for (int i = 0; i < 2; ++i) {
      ptx::store_shared(DscoreKeys<Traits>(shared.dscores[draw_at.stage], 2 * warp + i).word_address(), words[i]);
    }
    __syncwarp();
    if (tile::lane() == 0) ptx::arrive(shared.dscore_ring.empty[draw_at.stage]);
    draw_at.advance();
  }

  __device__ __forceinline__ void start(Dq& dq, int piece) const {
    tile::start_columns_product<kColumns>(dq, tile::BoxOperand(shared.dscores[0]).after(dscore_at.stage),
                                          tile::BoxOperand(shared.k[0]).after(k_at.stage), piece);
  }

  __device__ __forceinline__ void store(Dq& dq, const KeyTileWork& work, int query_tile, int head, int piece) const {
    const attention::BackwardParams& p = args.params;
    const int first_row = query_tile * Traits::kQueries + tile::warp() % 4 * 16;
    dq.scale(args.gradient_scale);
    Element* const target =
        p.dq.row<Element>(work.batch, head, work.query_begin + first_row) + piece * kColumns * p.dq.column_stride;
    const bool suspicious = store_row_chunks<Element>({.data = target,
                                                       .row_stride = p.dq.row_stride,
                                                       .column_stride = p.dq.column_stride,
                                                       .rows = work.visitor.num_queries - first_row,
                                                       .columns = static_cast<int>(p.head_dim_qk) - piece * kColumns},
                                                      dq);
    if (suspicious) args.workspace.dq_nan_flag(p, {work.batch, head, query_tile}, tile::warp() % 4) = 1;
  }
};

}  // namespace flash_attn_ext::sm90
