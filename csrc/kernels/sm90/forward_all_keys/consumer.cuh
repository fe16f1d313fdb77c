// A warpgroup that computes. The tiles of 64 queries of a block's units go to its warpgroups in turn.
//
//   S = Q K^T;  P = exp2(c S - c max S);  O = P V / sum P.
//
// With all keys there, nothing is left to others and nothing comes later: each row's maximum is known before its
// exponentials, or after the first of two parts of the keys.
#pragma once

#include <utility>

#include "kernels/score/score_tile.cuh"
#include "kernels/sm90/forward/row_softmax.cuh"
#include "kernels/sm90/forward_all_keys/finish.cuh"
#include "kernels/sm90/forward_all_keys/repair.cuh"
#include "kernels/sm90/uniform.h"

namespace flash_attn_ext::sm90 {

template <class Traits>
struct AllKeysConsumer {
  using Element = typename Traits::Element;
  using Scores = typename Traits::Scores;
  using Shared = AllKeysShared<Traits>;
  static constexpr int kParts = Traits::kTile.parts;

  const AllKeysArguments& args;
  Shared& shared;
  const int warpgroup;

  typename Shared::Units::Position at{};
  typename Shared::QueryRing::Position q_at{};
  int own = warpgroup;  // the unit's next tile of queries that is this warpgroup's
  Scores scores;
  tile::PackedRows<Traits::kPartKeys> p;
  typename Traits::Output out;
  RowSoftmax softmax;

  __device__ __forceinline__ void run() {
    bool more = find();
    if (more) start_scores(more, 0);
#pragma unroll 1
    while (more) {
      attend(std::make_integer_sequence<int, kParts - 1>{});
      const ResultRows rows = result_rows(args, shared.unit[at.stage], own);
      own += Shared::kWarpgroups;
      more = find();
      if constexpr (Traits::kTile.overlaps) start_scores(more, 0);
      finish(rows);
      if constexpr (!Traits::kTile.overlaps) start_scores(more, 0);
    }
    ptx::wait_products<0>();
    if (tile::lane() == 0) ptx::wait_until_written();  // results: they may be written again, and the block may end
    __syncwarp();
    if (shared.any_flagged[result_warp()]) repair_flagged<Traits>(args, warpgroup);
  }

 private:
  // Moves on to the next tile of queries, and gives back units in which there is none left. False at the end.
  __device__ __forceinline__ bool find() {
#pragma unroll 1
    for (;;) {
      shared.units.wait_full(at);
      const int tiles = uniform(shared.unit[at.stage].query_tiles);
      if (tiles == 0) return false;
      if (own < tiles) return true;
      own -= tiles;
      __syncwarp();
      if (tile::lane() == 0) ptx::arrive(shared.units.empty[at.stage]);
      at.advance();
    }
  }

  template <int... kBefore>
  __device__ __forceinline__ void attend(std::integer_sequence<int, kBefore...>) {
    weigh<0>();
    p.pack(scores, Element{});
    (attend_part<kBefore + 1>(), ...);
    if constexpr (kParts == 1) await_values();
    start_values(kParts - 1);
    finish_values();
  }

  // The scores of a part of the keys, while the part before it is added to O.
  template <int kPart>
  __device__ __forceinline__ void attend_part() {
    start_scores(false, kPart);
    if constexpr (kPart == 1) await_values();
    start_values(kPart - 1);
    weigh<kPart>([&](float computed) {
      ptx::compute_before_wait(computed);
      finish_values();
    });
    softmax.rescale(out);
    p.pack(scores, Element{});
  }

  // Of whatever is there where `arrives` is false at the end: a branch around the products would make ptxas wait for
  // each of them.
  __device__ __forceinline__ void start_scores(bool arrives, int part) {
    if (arrives) {
      shared.queries[warpgroup].wait_full(q_at);
      ptx::wait(shared.k_full[at.stage], at.parity);
    }
    const auto q = tile::BoxOperand<typename Traits::QTile>(shared.q[0][0]);
    const auto k = tile::BoxOperand<typename Traits::KTile>(shared.k[0]).after(at.stage);
    tile::start_wide_product(scores, q.after(warpgroup * Shared::kQueryStages + q_at.stage),
                             k.from_row(part * Traits::kPartKeys).template as<typename Traits::KPart>());
  }

  // scores -> P. interlude: as in RowSoftmax::update, of the second part.
  template <int kPart, class Interlude = NoInterlude>
  __device__ __forceinline__ void weigh(Interlude&& interlude = {}) {
    ptx::wait_products<kPart == 0 ? 0 : 1>();
    ptx::pin_registers(scores.c[0]);
    if constexpr (kPart == kParts - 1) release_queries();
    hide_invisible<kPart>(shared.unit[at.stage]);
    const Exponent exponent = {true, args.scale_log2e};
    if constexpr (kPart == 0) {
      softmax.template begin<Reference::kRaised>(scores, exponent);
    } else {
      softmax.template update<Reference::kRaised>(scores, exponent, 0.0f, interlude);
    }
  }

  template <int kPart>
  __device__ __forceinline__ void hide_invisible(const Unit& unit) {
    constexpr int kFirst = kPart * Traits::kPartKeys;
    constexpr int kLeast = all_keys_below(Traits::kKeys);  // without padding, calls with fewer have other kernels
    const auto keys = static_cast<int>(unit.item.sequence.num_keys);
    const ScoreTile<Rows::kQueries, Scores> where = {args.params, unit.item, int64_t{unit.first_query} + own_row(own),
                                                     kFirst};
    if (!args.params.visibility.unlimited() || (kParts > 1 && keys < kLeast)) {
      where.hide_invisible(scores);
    } else if (keys < kLeast) {
      where.template hide_absent<0>(scores);
    } else if (keys < kFirst + Traits::kPartKeys) {
      where.template hide_absent<(kLeast > kFirst ? (kLeast - kFirst) / 8 : 0)>(scores);
    }
  }

  __device__ __forceinline__ void await_values() { ptx::wait(shared.v_full[at.stage], at.parity); }
  __device__ __forceinline__ void start_values(int part) {
    const auto v = tile::BoxOperand<typename Traits::VTile>(shared.v[0]).after(at.stage);
    tile::start_product(out, p, v.from_row(part * Traits::kPartKeys).template as<typename Traits::VPart>(), part > 0);
  }
  __device__ __forceinline__ void finish_values() {
    ptx::wait_products<0>();
    ptx::pin_registers(out.c[0]);
  }

  // One thread arrives: its wait for the products has synchronised the others.
  __device__ __forceinline__ void release_queries() {
    if (threadIdx.x % tile::kWarpgroupSize == 0) ptx::arrive(shared.queries[warpgroup].empty[q_at.stage]);
    q_at.advance();
  }

  __device__ __forceinline__ void finish(const ResultRows& rows) {
    const bool suspicious = store_result<Traits>(args, rows, out, softmax, shared.out[warpgroup]);
    if (tile::lane() == 0) {
      *rows.nan_flag = suspicious;
      if (suspicious) shared.any_flagged[result_warp()] = true;
    }
    __syncwarp();
  }
};

}  // namespace flash_attn_ext::sm90
