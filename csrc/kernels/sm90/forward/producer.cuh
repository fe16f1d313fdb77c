// The thread that starts all copies: each tile's Q, and its K and V tile by tile.
#pragma once

#include "kernels/sm90/forward/arguments.h"
#include "kernels/sm90/forward/scheduler.cuh"
#include "kernels/sm90/forward/traits.h"

namespace flash_attn_ext::sm90 {

template <class Traits>
struct ForwardProducer {
  using Shared = ForwardShared<Traits>;
  using Work = typename Shared::Work;
  using Ring = typename decltype(Shared::k_ring)::Position;

  const ForwardArguments& args;
  Shared& shared;
  typename decltype(Shared::q_ring)::Position q_at{};
  Ring k_at{};
  Ring v_at{};
  typename decltype(Shared::work_ring)::Position work_at{};

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (;; work_at.advance()) {
      shared.work_ring.wait_full(work_at);
      const Work& work = shared.work[work_at.stage];
      if (work.kind == WorkKind::kEnd) break;
      if (work.kind != WorkKind::kAllPassed) {
        send(work);
      } else if (!shared.wait_for_flags()) {
        break;
      }
      ptx::arrive(shared.work_ring.empty[work_at.stage]);
    }
  }

 private:
  // K comes one tile ahead of V, as the products are.
  __device__ __forceinline__ void send(const Work& work) {
    if (work.begin == work.end) {
      let_claim(work);
      return;
    }
    Visit at = visit_from<Traits>(args.params, work, work.end - 1);
    Visit next = visit_from<Traits>(args.params, work, at.tile - 1);
    if (next.tile <= work.begin) let_claim(work);
    send_k(work, {at, next});
    send_q(work);
#pragma unroll 1
    while (next.tile >= work.begin) {
      const Visit after = visit_from<Traits>(args.params, work, next.tile - 1);
      if (next.tile > work.begin && after.tile <= work.begin) let_claim(work);
      send_k(work, {next, after});
      send_v(work, at.tile);
      at = next;
      next = after;
    }
    send_v(work, at.tile);
  }

  // With the last tile of keys but one: the next tile of queries may be claimed, and is found by the time it is needed.
  __device__ __forceinline__ void let_claim(const Work& work) const {
    if (work.kind == WorkKind::kTile) ptx::arrive(shared.may_claim);
  }

  // Where tile n of a matrix of keys begins.
  __device__ __forceinline__ static ptx::BoxOrigin key_origin(const Work& work, const OperandMap& operand, int n,
                                                              int column) {
    return {.column = column,
            .row = static_cast<int>(work.item.sequence.key_begin) + n * Traits::kTile.keys,
            .head = static_cast<int>(work.item.key_head) * operand.head_step,
            .batch = static_cast<int>(work.item.sequence.batch) * operand.batch_step};
  }
  // And a tile of queries.
  __device__ __forceinline__ static ptx::BoxOrigin query_origin(const Work& work, const OperandMap& operand, int row,
                                                                int column) {
    return {.column = column,
            .row = row,
            .head = static_cast<int>(work.item.head) * operand.head_step,
            .batch = static_cast<int>(work.item.sequence.batch) * operand.batch_step};
  }

  __device__ __forceinline__ void send_k(const Work& work, const KeyVisit& visit) {
    using Tile = typename Traits::KTile;
    shared.k_ring.wait_empty(k_at);
    ptx::Barrier& full = shared.k_ring.full[k_at.stage];
    if constexpr (Traits::kHasTerms) shared.visits[k_at.stage] = visit;
    if constexpr (Traits::kHasBoxes) {
      ptx::arrive_expecting(full, Tile::kBytes + sizeof(shared.bias[0]));
      copy_for_warpgroups(shared.bias[k_at.stage], args.bias, full,
                          query_origin(work, args.bias, work.first_query, visit.at.tile * Traits::kTile.keys));
    } else {
      ptx::arrive_expecting(full, Tile::kBytes);
    }
    shared.k[k_at.stage].copy(args.k.map, full, key_origin(work, args.k, visit.at.tile, 0));
    k_at.advance();
  }

  __device__ __forceinline__ void send_v(const Work& work, int n) {
    shared.v_ring.wait_empty(v_at);
    ptx::Barrier& full = shared.v_ring.full[v_at.stage];
    ptx::arrive_expecting(full, Traits::VTile::kBytes);
    shared.v[v_at.stage].copy(args.v.map, full, key_origin(work, args.v, n, work.first_column));
    v_at.advance();
  }

  __device__ __forceinline__ void send_q(const Work& work) {
    shared.q_ring.wait_empty(q_at);
    ptx::Barrier& full = shared.q_ring.full[q_at.stage];
    ptx::arrive_expecting(full, sizeof(shared.q[0]));
    copy_for_warpgroups(
        shared.q[q_at.stage], args.q, full,
        query_origin(work, args.q, static_cast<int>(work.item.sequence.query_begin) + work.first_query, 0));
    q_at.advance();
  }

  // A tile for each warpgroup's queries.
  template <class Tile>
  __device__ __forceinline__ static void copy_for_warpgroups(Tile (&tiles)[Shared::kWarpgroups],
                                                             const OperandMap& operand, ptx::Barrier& full,
                                                             ptx::BoxOrigin origin) {
#pragma unroll 1
    for (int w = 0; w < Shared::kWarpgroups; ++w, origin.row += tile::kWarpgroupRows) {
      tiles[w].copy(operand.map, full, origin);
    }
  }
};

}  // namespace flash_attn_ext::sm90
