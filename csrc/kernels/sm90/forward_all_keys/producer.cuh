// The threads that say what there is to do, and that start all copies.
#pragma once

#include "kernels/sm90/forward_all_keys/traits.h"
#include "ptx/dependent_launch.h"

namespace flash_attn_ext::sm90 {

template <class Traits>
struct AllKeysScheduler {
  using Shared = AllKeysShared<Traits>;

  const AllKeysArguments& args;
  Shared& shared;
  typename Shared::Units::Position at{};

  // By a warp, one thread of which goes on.
  __device__ __forceinline__ void start() {
    if (args.intervals.present()) ptx::allow_dependent_launch();  // the scan has ended
    if (tile::lane() == 0) run();
  }

 private:
  __device__ __forceinline__ void run() {
    for_each_unit(args, [&](int number) {
      Unit& unit = next();
      locate(unit, args, number);
      if (unit.query_tiles > 0) publish();
    });
    next().query_tiles = 0;
    publish();
  }

  __device__ __forceinline__ Unit& next() {
    shared.units.wait_empty(at);
    return shared.unit[at.stage];
  }
  __device__ __forceinline__ void publish() {
    ptx::arrive(shared.units.full[at.stage]);
    at.advance();
  }
};

template <class Traits>
struct AllKeysProducer {
  using Shared = AllKeysShared<Traits>;

  const AllKeysArguments& args;
  Shared& shared;
  typename Shared::Units::Position at{};
  typename Shared::QueryRing::Position q_at{};
  int warpgroup = 0;  // that the next tile of queries is for

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (;; at.advance()) {
      shared.units.wait_full(at);
      const Unit& unit = shared.unit[at.stage];
      const int tiles = unit.query_tiles;
      if (tiles == 0) break;
      send_keys(shared.k[at.stage], args.k, unit, shared.k_full[at.stage]);
      send_queries(unit, 0);
      send_keys(shared.v[at.stage], args.v, unit, shared.v_full[at.stage]);
#pragma unroll 1
      for (int i = 1; i < tiles; ++i) send_queries(unit, i);
      ptx::arrive(shared.units.empty[at.stage]);
    }
  }

 private:
  template <class Tile>
  __device__ __forceinline__ static void send_keys(Tile& to, const OperandMap& operand, const Unit& unit,
                                                   ptx::Barrier& full) {
    ptx::arrive_expecting(full, Tile::kBytes);
    to.copy(operand.map, full,
            {.column = 0,
             .row = static_cast<int>(unit.item.sequence.key_begin),
             .head = static_cast<int>(unit.item.key_head) * operand.head_step,
             .batch = static_cast<int>(unit.item.sequence.batch) * operand.batch_step});
  }

  __device__ __forceinline__ void send_queries(const Unit& unit, int query_tile) {
    auto& ring = shared.queries[warpgroup];
    ring.wait_empty(q_at);
    ptx::Barrier& full = ring.full[q_at.stage];
    ptx::arrive_expecting(full, Traits::QTile::kBytes);
    shared.q[warpgroup][q_at.stage].copy(
        args.q.map, full,
        {.column = 0,
         .row = static_cast<int>(unit.item.sequence.query_begin) + unit.first_query + query_tile * tile::kWarpgroupRows,
         .head = static_cast<int>(unit.item.head) * args.q.head_step,
         .batch = static_cast<int>(unit.item.sequence.batch) * args.q.batch_step});
    if (++warpgroup == Shared::kWarpgroups) {
      warpgroup = 0;
      q_at.advance();
    }
  }
};

}  // namespace flash_attn_ext::sm90
