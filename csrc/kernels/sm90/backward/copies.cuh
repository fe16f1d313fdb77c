// The threads that fetch data: one claims tiles of keys, one starts the copies of what they need.
#pragma once

#include "kernels/sm90/backward/listed_visits.cuh"
#include "kernels/sm90/backward/traits.h"
#include "ptx/bulk_copy.h"
#include "ptx/global_memory.h"

namespace flash_attn_ext::sm90 {

template <class Traits>
struct BackwardScheduler {
  using Shared = BackwardShared<Traits>;

  const BackwardArguments& args;
  Shared& shared;
  typename decltype(Shared::work_ring)::Position at{};

  __device__ __forceinline__ void run() {
    const uint32_t count = args.order.num_claims();
    int parity = 0;
#pragma unroll 1
    for (uint32_t index = blockIdx.x; index < count; index = claim()) {
      shared.work_ring.wait_empty(at);
      ptx::arrive_expecting(shared.work_ring.full[at.stage], sizeof(KeyTileWork));
      ptx::copy_bytes(&shared.work[at.stage], args.workspace.table + index, sizeof(KeyTileWork),
                      shared.work_ring.full[at.stage]);
      shared.work_ring.wait_full(at);
      const int group_end = shared.work[at.stage].group_end;
      at.advance();
      // An early claim would spoil the order, which few queries do not depend on.
      if (args.order.divided) continue;
      ptx::wait(shared.may_claim, parity);
      parity ^= 1;
      // A tile that goes round waits for others of its group: a block must not hold two of them.
      while (ptx::load_acquire(reinterpret_cast<const int*>(args.workspace.claims)) + static_cast<int>(gridDim.x) <
             group_end) {
      }
    }
    shared.work_ring.wait_empty(at);
    shared.work[at.stage].batch = KeyTileWork::kEnd;
    ptx::arrive(shared.work_ring.full[at.stage]);
  }

 private:
  __device__ __forceinline__ uint32_t claim() const { return gridDim.x + atomicAdd(args.workspace.claims, 1u); }
};

template <class Traits>
struct BackwardProducer {
  using Shared = BackwardShared<Traits>;

  const BackwardArguments& args;
  Shared& shared;
  typename decltype(Shared::q_ring)::Position q_at{};
  typename decltype(Shared::k_ring)::Position k_at{};
  typename decltype(Shared::work_ring)::Position work_at{};

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (;; work_at.advance()) {
      shared.work_ring.wait_full(work_at);
      const KeyTileWork& work = shared.work[work_at.stage];
      if (work.batch == KeyTileWork::kEnd) break;
      send(work);
      ptx::arrive(shared.may_claim);
      ptx::arrive(shared.work_ring.empty[work_at.stage]);
    }
  }

 private:
  __device__ __forceinline__ void send(const KeyTileWork& work) {
    if (work.visits == 0) {
      pass_keys();
    } else if constexpr (Traits::kMasked) {
      send_listed(work);
    } else {
      send_all(work);
    }
  }

  // Those that a mask leaves.
  __device__ __forceinline__ void send_listed(const KeyTileWork& work) {
    ListedVisits visits{args, work};
#pragma unroll 1
    for (int left = work.visits; left > 0; --left) {
      const MaskVisits::Entry entry = visits.entry();  // it comes while the stage is waited for
      shared.q_ring.wait_empty(q_at);
      MaskedVisit& to = shared.visit(q_at);
      to.query_tile = entry.query_tile;
      to.head = visits.head;
      to.sums = visits.head * args.workspace.sums_of_head + work.first_sums + entry.query_tile;
      to.place = entry.place;
      to.is_last = entry.is_last != 0;
      to.ends_tile = left == 1;
      for (int w = 0; w < VisitOrder::kParts; ++w) to.is_partial[w] = !work.own[w].full(entry.query_tile);
      to.mask_tile = entry.mask_tile;
      if (entry.mask_tile != MaskVisits::Entry::kNothingMasked) visits.fetch(entry.mask_tile);
      send_queries(work, to.query_tile, to.head, to.sums);
      if (left > 1) visits.advance();
      send_visit(work, to, left == work.visits);
    }
  }

  __device__ __forceinline__ void send_all(const KeyTileWork& work) {
    const int first_head =
        work.key_head * static_cast<int>(args.params.queries_per_key_head()) + work.member * work.heads;
    // The query heads of a group come one after the other, so that L2 holds what neighbouring visitors share; in a
    // descending walk all of them at a tile before the next: shorter walks would catch up with those they wait for.
    const bool heads_first = work.visitor.walk == Walk::kDescend;
    int member = 0;
    int query_tile = work.first;
#pragma unroll 1
    for (int left = work.visits; left > 0; --left) {
      const VisitOrder::Tiles visitors = work.visitor.visitors(query_tile);
      const int place = work.visitor.place(query_tile, visitors);
      const int head = first_head + member;
      const int sums = head * args.workspace.sums_of_head + work.first_sums + (query_tile << args.order.log2_sums);
      shared.q_ring.wait_empty(q_at);
      send_queries(work, query_tile, head, sums);
      Visit& to = shared.visit(q_at);
      to = {.query_tile = query_tile,
            .head = head,
            .sums = sums,
            .place = place,
            .is_last = place + 1 == visitors.end - visitors.begin,
            .ends_tile = left == 1,
            .is_partial = {!work.own[0].full(query_tile), !work.own[1].full(query_tile)}};
      send_visit(work, to, left == work.visits);
      if (heads_first) {
        if (++member == work.heads) {
          member = 0;
          --query_tile;
        }
      } else {
        if (++query_tile == work.end) query_tile = work.begin;
        if (query_tile == work.first) ++member;
      }
    }
  }

  // A visit's Q and statistics, whose copies need not wait for its description: the barrier's phase lasts until
  // send_visit() arrives, and bytes that come before are counted below zero (PTX ISA, mbarrier: range of the tx-count).
  __device__ __forceinline__ void send_queries(const KeyTileWork& work, int query_tile, int head, int sums) {
    ptx::Barrier& full = shared.q_ring.full[q_at.stage];
    const int row = work.query_begin + query_tile * Traits::kQueries;
    shared.q[q_at.stage].copy(args.q.map, full, {0, row, head * args.q.head_step, work.batch * args.q.batch_step});
    ptx::copy_bytes(shared.statistics[q_at.stage], args.workspace.statistics_of(sums >> args.order.log2_sums),
                    sizeof(shared.statistics[0]), full);
  }

  // K before dO, V after it: in the order in which the products need them.
  __device__ __forceinline__ void send_visit(const KeyTileWork& work, const Visit& to, bool is_first) {
    const int row = work.query_begin + to.query_tile * Traits::kQueries;
    ptx::arrive_expecting(shared.q_ring.full[q_at.stage], Traits::QTile::kBytes + sizeof(shared.statistics[0]));
    if (is_first) {
      shared.k_ring.wait_empty(k_at);
      send_keys(work, shared.k[k_at.stage], args.k, shared.k_ring.full[k_at.stage]);
    }
    ptx::Barrier& dout_full = shared.dout_full[q_at.stage];
    ptx::arrive_expecting(dout_full, Traits::DoutTile::kBytes + (Traits::kBiased ? Traits::DscoreTile::kBytes : 0));
    shared.dout[q_at.stage].copy(args.dout.map, dout_full,
                                 {0, row, to.head * args.dout.head_step, work.batch * args.dout.batch_step});
    if (is_first) {
      shared.v_ring.wait_empty(k_at);
      send_keys(work, shared.v[k_at.stage], args.v, shared.v_ring.full[k_at.stage]);
      k_at.advance();
    }
    if constexpr (Traits::kBiased) {
      // Where dS of the visit will lie: its stage is empty soon after that of Q.
      shared.dscore_ring.wait_empty(q_at);
      shared.dscores[q_at.stage].copy(args.bias.map, dout_full,
                                      {work.visitor.tile * Traits::kKeys, to.query_tile * Traits::kQueries,
                                       to.head * args.bias.head_step, work.batch * args.bias.batch_step});
    }
    q_at.advance();
  }

  // The stages of a tile that visits nothing: its gradients leave through them, too.
  __device__ __forceinline__ void pass_keys() {
    shared.k_ring.wait_empty(k_at);
    ptx::arrive(shared.k_ring.full[k_at.stage]);
    shared.v_ring.wait_empty(k_at);
    ptx::arrive(shared.v_ring.full[k_at.stage]);
    k_at.advance();
  }

  template <class Tile>
  __device__ __forceinline__ void send_keys(const KeyTileWork& work, Tile& tile, const OperandMap& operand,
                                            ptx::Barrier& full) const {
    ptx::arrive_expecting(full, Tile::kBytes);
    const ptx::BoxOrigin origin = {0, work.key_begin + work.visitor.tile * Traits::kKeys,
                                   work.key_head * operand.head_step, work.batch * operand.batch_step};
    if (args.order.members == 1) {
      tile.copy(operand.map, full, origin, ptx::evict_first());
    } else {  // other query heads' claims read the same keys
      tile.copy(operand.map, full, origin);
    }
  }
};

}  // namespace flash_attn_ext::sm90
