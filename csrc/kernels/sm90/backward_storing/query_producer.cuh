// The thread that claims tiles of queries, says what each one sees, and starts the copies that it needs.
#pragma once

#include "kernels/sm90/backward_storing/attended_keys.cuh"
#include "kernels/sm90/backward_storing/traits.h"

namespace flash_attn_ext::sm90 {

template <class Traits>
struct QueryProducer {
  using Shared = StoringDqShared<Traits>;
  using Found = typename AttendedKeys<Traits>::Found;

  const StoringArguments& args;
  Shared& shared;
  tile::RingPosition<1> q_at{};
  typename decltype(Shared::k_ring)::Position k_at{};
  typename decltype(Shared::v_ring)::Position v_at{};
  typename decltype(Shared::work_ring)::Position work_at{};

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (uint32_t index = blockIdx.x; index < args.schedule.num_blocks; index = claim()) {
      shared.work_ring.wait_empty(work_at);
      QueryTileWork& work = shared.work[work_at.stage];
      if (!describe(work, index)) continue;
      if constexpr (Traits::kSkipsTiles) {
        AttendedKeys<Traits> keys(args, work);
        const Found first = keys.next();
        if (first.tile == AttendedKeys<Traits>::kNone) work.end = work.begin;
        ptx::arrive(shared.work_ring.full[work_at.stage]);
        if (first.tile != AttendedKeys<Traits>::kNone) send_attended(work, keys, first);
      } else {
        ptx::arrive(shared.work_ring.full[work_at.stage]);
        send(work);
      }
      work_at.advance();
    }
    shared.work_ring.wait_empty(work_at);
    shared.work[work_at.stage].batch = QueryTileWork::kEnd;
    ptx::arrive(shared.work_ring.full[work_at.stage]);
  }

 private:
  __device__ __forceinline__ uint32_t claim() const { return gridDim.x + atomicAdd(args.claims, 1u); }

  // False: the sequence has no such tile.
  __device__ __forceinline__ bool describe(QueryTileWork& work, uint32_t index) const {
    const attention::BackwardParams& p = args.params;
    const Place at = args.schedule.place(index);
    const attention::Sequence sequence = p.sequences.at(at.batch);
    const auto first = static_cast<int>(first_query_of(args.schedule, at, Traits::kQueries));
    const int first_row = ScoreTiles::first_row(p, sequence);
    const int tile = first / Traits::kRows;
    if (first >= sequence.num_queries || tile < args.tiles.begin_of(first_row) ||
        tile >= args.tiles.end_of(first_row)) {
      return false;
    }
    work.batch = static_cast<int>(at.batch);
    work.key_head = static_cast<int>(at.key_head);
    work.head_of_group = static_cast<int>(at.head_of_group);
    work.head = static_cast<int>(at.key_head * args.schedule.group + at.head_of_group);
    work.query_begin = static_cast<int>(sequence.query_begin);
    work.key_begin = static_cast<int>(sequence.key_begin);
    work.num_queries = static_cast<int>(sequence.num_queries);
    work.num_keys = static_cast<int>(sequence.num_keys);
    work.tile = tile;
    work.statistics = work.head * args.workspace.tiles_of_head + StoringWorkspace::first_tile(p, sequence) + work.tile;
    const int stored = args.tiles.first_of_head(p, sequence, work.key_head, work.head_of_group);
    const SeenTiles seen = SeenTiles::of(p.visibility, sequence);
    TileRange all = {0, 0, 0, 0};
#pragma unroll 1
    for (int w = 0; w < Traits::kWarpgroups; ++w) {
      const TileRange own = seen.keys_of(work.tile + w);
      work.own[w] = own;
      work.stored[w] = stored + args.tiles.before(first_row + tile + w);
      all = joined(all, own);
    }
    work.begin = all.begin;
    work.end = all.end;
    return true;
  }

  // K before dO, V after it: in the order in which the products need them.
  __device__ __forceinline__ void send(const QueryTileWork& work) {
    if (work.begin >= work.end) return;
    send_each(work, shared.q, args.q, shared.q_ring);
    send_keys(work, work.begin);
    send_each(work, shared.dout, args.dout, shared.dout_ring);
    q_at.advance();
    send_values(work, work.begin);
#pragma unroll 1
    for (int tile = work.begin + 1; tile < work.end; ++tile) {
      send_keys(work, tile);
      send_values(work, tile);
    }
  }

  // The same of tiles of which a mask leaves anything.
  __device__ __forceinline__ void send_attended(const QueryTileWork& work, AttendedKeys<Traits>& keys, Found at) {
    send_each(work, shared.q, args.q, shared.q_ring);
    bool is_first = true;
#pragma unroll 1
    for (;;) {
      const Found next = keys.next();
      const bool is_last = next.tile == AttendedKeys<Traits>::kNone;
      shared.k_ring.wait_empty(k_at);
#pragma unroll
      for (int w = 0; w < Traits::kWarpgroups; ++w) {
        const int next_seen = !is_last && (next.flags[w] & AttendedVisit::kSeen) != 0 ? AttendedVisit::kNextSeen : 0;
        shared.visits[k_at.stage][w].word =
            at.tile << AttendedVisit::kTileShift | at.flags[w] | next_seen | (is_last ? AttendedVisit::kLast : 0);
      }
      send_keys(work, at.tile);
      if (is_first) {
        send_each(work, shared.dout, args.dout, shared.dout_ring);
        q_at.advance();
        is_first = false;
      }
      send_values(work, at.tile);
      if (is_last) break;
      at = next;
    }
  }

  template <class Tile>
  __device__ __forceinline__ void send_each(const QueryTileWork& work, Tile (&to)[Traits::kWarpgroups],
                                            const OperandMap& operand,
                                            tile::RingBarriers<1> (&rings)[Traits::kWarpgroups]) const {
#pragma unroll 1
    for (int w = 0; w < Traits::kWarpgroups; ++w) send_queries(work, w, to[w], operand, rings[w]);
  }

  template <class Tile>
  __device__ __forceinline__ void send_queries(const QueryTileWork& work, int warpgroup, Tile& to,
                                               const OperandMap& operand, tile::RingBarriers<1>& ring) const {
    ring.wait_empty(q_at);
    ptx::arrive_expecting(ring.full[0], Tile::kBytes);
    to.copy(operand.map, ring.full[0],
            {0, work.query_begin + (work.tile + warpgroup) * Traits::kRows, work.head * operand.head_step,
             work.batch * operand.batch_step});
  }
  __device__ __forceinline__ void send_keys(const QueryTileWork& work, int tile) {
    if constexpr (!Traits::kSkipsTiles) shared.k_ring.wait_empty(k_at);
    ptx::Barrier& full = shared.k_ring.full[k_at.stage];
    if constexpr (Traits::kHasBoxes) {
      ptx::arrive_expecting(full, Traits::KTile::kBytes + sizeof(shared.bias[0]));
      send_bias(work, tile, full);
    } else {
      ptx::arrive_expecting(full, Traits::KTile::kBytes);
    }
    send_rows(work, tile, shared.k[k_at.stage], args.k, full);
    k_at.advance();
  }
  __device__ __forceinline__ void send_values(const QueryTileWork& work, int tile) {
    shared.v_ring.wait_empty(v_at);
    ptx::Barrier& full = shared.v_ring.full[v_at.stage];
    ptx::arrive_expecting(full, Traits::VTile::kBytes);
    send_rows(work, tile, shared.v[v_at.stage], args.v, full);
    v_at.advance();
  }
  // Of the queries of each warpgroup, counted in their sequence.
  __device__ __forceinline__ void send_bias(const QueryTileWork& work, int tile, ptx::Barrier& full) const {
#pragma unroll 1
    for (int w = 0; w < Traits::kWarpgroups; ++w) {
      shared.bias[k_at.stage][w].copy(args.bias.map, full,
                                      {tile * Traits::kRows, (work.tile + w) * Traits::kRows,
                                       work.head * args.bias.head_step, work.batch * args.bias.batch_step});
    }
  }
  template <class Tile>
  __device__ __forceinline__ void send_rows(const QueryTileWork& work, int tile, Tile& to, const OperandMap& operand,
                                            ptx::Barrier& full) const {
    to.copy(
        operand.map, full,
        {0, work.key_begin + tile * Traits::kRows, work.key_head * operand.head_step, work.batch * operand.batch_step});
  }
};

}  // namespace flash_attn_ext::sm90
