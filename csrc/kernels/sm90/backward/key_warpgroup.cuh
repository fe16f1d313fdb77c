// A warpgroup that computes dV and dK of 64 keys, and dS for dQ. Rows are keys, so that P^T and dS^T are left operands
// as they come out of the products before:
//
//   S^T = K Q^T  |  P^T = exp2(c S^T - lse)  |  dP^T = V dO^T, dV += P^T dO  |  dS^T = P^T (dP^T - delta)
//   dK += dS^T Q, and S^T of the next tile of queries, while dS^T goes to shared memory
#pragma once

#include <type_traits>

#include "kernels/sm90/backward/attended_scores.cuh"
#include "kernels/sm90/backward/dscore_keys.cuh"
#include "kernels/sm90/backward/key_gradient_rows.cuh"
#include "kernels/sm90/backward/key_scores.cuh"
#include "kernels/sm90/backward/member_sums.cuh"
#include "kernels/sm90/backward/traits.h"
#include "ptx/ldmatrix.h"

namespace flash_attn_ext::sm90 {

template <class Traits>
struct KeyWarpgroup {
  using Element = typename Traits::Element;
  using Shared = BackwardShared<Traits>;
  using Scores = typename Traits::Scores;
  using Where = typename Traits::Where;
  using PackedScores = tile::PackedRows<Traits::kQueries>;
  static constexpr bool kInRegisters = Traits::kTile.keys_in_registers;
  // The last tile's dK and dV leave through V's stage: V comes late.
  static constexpr bool kAwaitsValuesLate = Traits::kAnnouncesVisits;
  struct NotHeld {};

  const BackwardArguments& args;
  Shared& shared;
  const int warpgroup;

  Scores scores;
  Scores gradients;  // dP
  PackedScores p;
  PackedScores dscores;
  tile::WarpgroupAccumulator<Traits::kDims.qk> dk;
  tile::WarpgroupAccumulator<Traits::kDims.v> dv;
  bool is_empty = true;     // dK and dV
  bool is_partial = false;  // something of the keys is hidden from the queries at hand
  std::conditional_t<kInRegisters, tile::PackedRows<Traits::kDims.qk>, NotHeld> k;
  std::conditional_t<kInRegisters, tile::PackedRows<Traits::kDims.v>, NotHeld> v;
  typename Shared::Stage at{};  // of Q, dO and dS
  typename decltype(Shared::k_ring)::Position k_at{};
  typename decltype(Shared::work_ring)::Position work_at{};
  std::conditional_t<Traits::kMasked, AttendedScores, NotHeld> attended;  // of the queries at hand
  KeyScores<Traits> to_gradients{args, shared};
  std::conditional_t<Traits::kAddsStatistics, tile::TermFactors<Element>, NotHeld> factors;

  __device__ __forceinline__ void run() {
    if constexpr (Traits::kAddsStatistics) factors.init();
    dk.clear();
    dv.clear();
#pragma unroll 1
    for (;;) {
      shared.work_ring.wait_full(work_at);
      const KeyTileWork& work = shared.work[work_at.stage];
      if (uniform(work.batch) == KeyTileWork::kEnd) break;
      is_empty = true;
      shared.k_ring.wait_full(k_at);
      if constexpr (!kAwaitsValuesLate) shared.v_ring.wait_full(k_at);
      const int visits = uniform(work.visits);
      if (visits > 0) differentiate(work, visits);
      release(shared.k_ring.empty[k_at.stage]);
      if (kAwaitsValuesLate && is_empty) shared.v_ring.wait_full(k_at);
      if (is_empty && args.order.members == 1) {
        store_zeros(rows_of(work).dk());
        store_zeros(rows_of(work).dv());
      } else {
        store(work);
      }
      ptx::fence_stores();  // to V's rows, before what the copy engine writes there
      release(shared.v_ring.empty[k_at.stage]);
      k_at.advance();
      release(shared.work_ring.empty[work_at.stage]);
      work_at.advance();
    }
  }

 private:
  static constexpr int kWarpRows = 16;
  __device__ __forceinline__ int first_row() const { return warpgroup * tile::kWarpgroupRows; }
  __device__ __forceinline__ int warp_row() const { return first_row() + tile::warp() % 4 * kWarpRows; }

  __device__ __forceinline__ void differentiate(const KeyTileWork& work, int visits) {
    // Visits whose queries see only the other warpgroup's keys come before and behind its own: these are passed over.
    // Not where heads come one after the other, each with such visits, nor where a mask leaves some visits out.
    const TileRange& own = work.own[warpgroup];
    const int group = work.heads;
    const bool descends = work.visitor.walk == Walk::kDescend;
    const bool passes = !Traits::kMasked && (descends || group == 1);
    const int own_visits = passes ? (own.end - own.begin) * group : visits;
    const int steps = uniform(!Traits::kMasked && own.empty() ? 0 : own_visits);
    const int before = uniform(!passes ? 0 : group * (descends ? work.end - own.end : own.begin - work.begin));
    if constexpr (kInRegisters) {
      load_rows(k, shared.k[k_at.stage]);
      load_rows(v, shared.v[k_at.stage]);
    }
    if (steps > 0) {
      pass(before);
      start_scores(at, std::true_type{});
      go_to(at, std::true_type{});
      ptx::wait_products<0>();
      ptx::pin_registers(scores.c[0]);
      if constexpr (Traits::kOneStep) {
#pragma unroll 1
        for (int i = 1; i <= steps; ++i) step(work, i < steps);
      } else {
#pragma unroll 1
        for (int i = 1; i < steps; ++i) step(work, std::true_type{});
        step(work, std::false_type{});
      }
      pass(visits - before - steps);
    } else {
      pass(visits);
    }
  }

  // By all warps that have read or written what the barrier stands for.
  __device__ __forceinline__ static void release(ptx::Barrier& barrier) {
    __syncwarp();
    if (tile::lane() == 0) ptx::arrive(barrier);
  }

  // HasNext: bool, or what the compiler knows.
  template <class HasNext>
  __device__ __forceinline__ void step(const KeyTileWork& work, HasNext has_next) {
    typename Shared::Stage next = at;
    next.advance();
    if (is_partial) hide(work, shared.visit(at).query_tile);
    if constexpr (Traits::kMasked) attended.hide(scores);
    if constexpr (Traits::kBiased) wait_for_dout();  // and the bias
    to_gradients.exponentiate(scores, p, at.stage, own_dscores());
    start_dp();
    if constexpr (Traits::kDrops) drop();
    start_dv();
    // With dV in flight, P needs registers beside those of dS.
    ptx::wait_products<kInRegisters ? 1 : 0>();
    ptx::pin_registers(gradients.c[0]);
    if constexpr (!kInRegisters) ptx::pin_registers(dv.c[0]);
    to_gradients.differentiate(dscores, scores, gradients, p, at.stage);
    start_dk();
    hand_over();
    if constexpr (!std::is_same_v<HasNext, std::false_type>) start_scores(next, has_next);
    const int done = at.stage;
    go_to(next, has_next);
    ptx::wait_products<0>();
    ptx::pin_registers(scores.c[0]);
    ptx::pin_registers(dk.c[0]);
    ptx::pin_registers(dv.c[0]);
    is_empty = false;
    release(shared.q_ring.empty[done]);
  }

  // Looks ahead while products are in flight, at whatever lies there if nothing comes next. The stage is known to be
  // the same in all threads: else products' descriptors would not be in uniform registers.
  __device__ __forceinline__ void go_to(const typename Shared::Stage& next, bool is_there) {
    at = {uniform(next.stage), next.parity};
    is_partial = uniform(shared.visit(at).is_partial[warpgroup]) != 0;
    if constexpr (Traits::kMasked) {
      if (is_there) {
        attended.read(args.mask, shared.visit(at).mask_tile, static_cast<int>(threadIdx.x) - tile::kWarpgroupSize);
      }
    }
  }

  // P of what is dropped becomes 0, while dP is in flight. The draws come when dQ of an earlier visit is done: they are
  // not waited for before.
  __device__ __forceinline__ void drop() {
    wait_for_stage();
    to_gradients.drop(p, own_dscores());
  }

  // Until dS's is empty, and, with dropout, has the draws: then the first round has to be waited for, too.
  __device__ __forceinline__ void wait_for_stage() const {
    ptx::wait(shared.dscore_ring.empty[at.stage], Traits::kDrops ? at.parity : at.parity ^ 1);
  }

  // What S (0) and dP (1) of a stage are added.
  __device__ __forceinline__ auto terms(int which, int stage) const {
    if constexpr (Traits::kAddsStatistics) {
      return tile::AddedTerms(factors, shared.statistics[0][which], 2 * stage);
    } else {
      return tile::NoTerms{};
    }
  }

  // Of a tile that is not there, whatever lies in its stage.
  __device__ __forceinline__ void start_scores(const typename Shared::Stage& of, bool is_there) {
    if (is_there) shared.q_ring.wait_full(of);
    const auto q = tile::BoxOperand(shared.q[0]).after(of.stage);
    if constexpr (kInRegisters) {
      tile::start_rows_product(scores, k, q, terms(0, of.stage));
    } else {
      tile::start_rows_product(scores, tile::BoxOperand(shared.k[0]).after(k_at.stage).from_row(first_row()), q,
                               terms(0, of.stage));
    }
  }
  __device__ __forceinline__ void wait_for_dout() const { ptx::wait(shared.dout_full[at.stage], at.parity); }
  __device__ __forceinline__ void start_dp() {
    if constexpr (!Traits::kBiased) wait_for_dout();
    const auto dout = tile::BoxOperand(shared.dout[0]).after(at.stage);
    if constexpr (kInRegisters) {
      tile::start_rows_product(gradients, v, dout, terms(1, at.stage));
    } else {
      if (kAwaitsValuesLate && is_empty) shared.v_ring.wait_full(k_at);
      tile::start_rows_product(gradients, tile::BoxOperand(shared.v[0]).after(k_at.stage).from_row(first_row()), dout,
                               terms(1, at.stage));
    }
  }
  __device__ __forceinline__ void start_dv() {
    tile::start_product(dv, p, tile::BoxOperand(shared.dout[0]).after(at.stage), !is_empty);
  }
  __device__ __forceinline__ void start_dk() {
    tile::start_product(dk, dscores, tile::BoxOperand(shared.q[0]).after(at.stage), !is_empty);
  }

  // What a key's queries may not see, and keys that the sequence does not have, becomes -inf.
  __device__ __forceinline__ void hide(const KeyTileWork& work, int query_tile) {
    const WorkItem item = {work.sequence(), 0, work.key_head};
    const int first_key = work.visitor.tile * Traits::kKeys + warp_row();
    const Where where = {args.params, item, first_key, query_tile * Traits::kQueries};
    where.hide_invisible(scores);
#pragma unroll
    for (int r = 0; r < Scores::kThreadRows; ++r) {
      if (first_key + Scores::row(r) < work.visitor.num_keys) continue;
#pragma unroll
      for (int j = 0; j < Scores::kColumnTiles; ++j) scores.at(r, j, 0) = scores.at(r, j, 1) = -INFINITY;
    }
  }

  // The lane's row of the warp's 16 of a tile, and its half of 16 columns: as ldmatrix wants them.
  template <class Tile>
  __device__ __forceinline__ uint32_t lane_address(const Tile& tile, int step) const {
    const int row = warp_row() + tile::lane() % 16;
    const int piece = step % 4 * 2 + tile::lane() / 16;
    return ptx::shared_address(&tile) + step / 4 * Tile::kChunkBytes + row * tile::kBoxRowBytes +
           (piece ^ (row & 7)) * 16;
  }

  // dS -> shared memory.
  __device__ __forceinline__ void hand_over() const {
    if constexpr (!Traits::kDrops) wait_for_stage();
    own_dscores().store(dscores);
    finish_dscores();
  }
  __device__ __forceinline__ DscoreKeys<Traits> own_dscores() const {
    return {shared.dscores[at.stage], tile::warp() - tile::kWarpgroupSize / tile::kWarpSize};
  }
  __device__ __forceinline__ void finish_dscores() const {
    ptx::fence_stores();
    release(shared.dscore_ring.full[at.stage]);
  }

  // Tiles of queries that see only the other warpgroup's keys: no dS of these.
  __device__ __forceinline__ void pass(int visits) {
#pragma unroll 1
    for (int i = 0; i < visits; ++i) pass();
  }
  __device__ __forceinline__ void pass() {
    shared.q_ring.wait_full(at);
    wait_for_dout();
    wait_for_stage();
    own_dscores().clear();
    finish_dscores();
    if (tile::lane() == 0) ptx::arrive(shared.q_ring.empty[at.stage]);
    at.advance();
    __syncwarp();
  }

  // A warp's 16 keys as a left operand.
  template <class Packed, class Tile>
  __device__ __forceinline__ void load_rows(Packed& packed, const Tile& tile) const {
#pragma unroll
    for (int step = 0; step < Packed::kSteps; ++step) ptx::load_matrix_x4(packed.a[step], lane_address(tile, step));
  }

  __device__ __forceinline__ void store(const KeyTileWork& work) {
    if (args.order.members > 1) {
      if (is_empty) {
        dk.clear();
        dv.clear();
      }
      if (first_key_of(work) < work.visitor.num_keys &&
          !MemberSums<Traits>{args, work, warpgroup}.join(dk, dv, shared.arrived[warpgroup])) {
        return;
      }
    }
    meet_key_warpgroup(warpgroup);  // V has no readers any more
    dk.scale(args.gradient_scale);
    dv.scale(to_gradients.factor());
    // Through the warp's rows of V. L2 is for what other tiles read and add to.
    auto& staging = shared.v[k_at.stage];
    const bool suspicious = store_boxes(rows_of(work).dk(), dk, staging, warp_row(), ptx::stream_global_16) |
                            store_boxes(rows_of(work).dv(), dv, staging, warp_row(), ptx::stream_global_16);
    if (suspicious) rows_of(work).nan_flag() = 1;
    __syncwarp();  // converged: else ptxas keeps no descriptor in uniform registers
  }
  __device__ __forceinline__ int first_key_of(const KeyTileWork& work) const {
    return work.visitor.tile * Traits::kKeys + first_row();
  }
  __device__ __forceinline__ KeyGradientRows<Traits> rows_of(const KeyTileWork& work) const {
    return {args, work, warpgroup};
  }
};

}  // namespace flash_attn_ext::sm90
