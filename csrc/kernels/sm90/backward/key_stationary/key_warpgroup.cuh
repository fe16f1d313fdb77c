// A key warpgroup: it computes dV and dK of 64 keys, and dS for dQ. Rows are keys, so that P^T and dS^T come out of one
// GEMM as left operands of the next, in registers:
//
//   S^T = K Q^T  |  P^T = exp2(c S^T - lse)  |  dP^T = V dO^T, dV += P^T dO  |  dS^T = P^T (dP^T - delta)
//   dK += dS^T Q, and S^T of the next query tile, while dS^T goes to shared memory
#pragma once

#include <type_traits>

#include "kernels/sm90/backward/key_stationary/dscore_keys.cuh"
#include "kernels/sm90/backward/key_stationary/key_epilogue.cuh"
#include "kernels/sm90/backward/key_stationary/key_scores.cuh"
#include "kernels/sm90/backward/key_stationary/traits.h"
#include "ptx/ldmatrix.h"

namespace flash_attn_ext::sm90 {

template <class Traits>
struct KeyWarpgroup {
  using Element = typename Traits::Element;
  using Shared = KeyStationaryShared<Traits>;
  using Work = typename Traits::Work;
  using Scores = typename Traits::Scores;
  using Where = typename Traits::Where;
  using PackedScores = tile::PackedRows<Traits::kQueries>;
  static constexpr bool kInRegisters = Traits::kConfig.tile.keys_in_registers;
  // dK and dV of the preceding key tile are staged in V's stage, so V arrives late.
  static constexpr bool kAwaitsValuesLate = Traits::kConfig.pre_signals_dq;
  struct NotHeld {};

  const KeyStationaryArguments& args;
  Shared& shared;
  const int warpgroup;

  Scores scores;
  Scores gradients;  // dP
  PackedScores p;
  PackedScores dscores;
  tile::WarpgroupAccumulator<Traits::kDims.qk> dk;
  tile::WarpgroupAccumulator<Traits::kDims.v> dv;
  bool is_empty = true;     // no iteration of the key tile has added to dK and dV yet
  bool is_partial = false;  // the iteration has scores that are masked by position
  std::conditional_t<kInRegisters, tile::PackedRows<Traits::kDims.qk>, NotHeld> k;
  std::conditional_t<kInRegisters, tile::PackedRows<Traits::kDims.v>, NotHeld> v;
  typename Shared::QueryState state{};  // of Q, dO and dS
  typename decltype(Shared::k_pipeline)::State k_state{};
  typename decltype(Shared::work_pipeline)::State work_state{};
  std::conditional_t<Traits::kMasked, UnmaskedScores, NotHeld> unmasked;  // of the iteration
  KeyScores<Traits> to_gradients{args, shared};
  std::conditional_t<Traits::kConfig.adds_statistics, tile::ColumnFactors<Element>, NotHeld> factors;

  __device__ __forceinline__ void run() {
    if constexpr (Traits::kConfig.adds_statistics) factors.init();
    dk.clear();
    dv.clear();
#pragma unroll 1
    for (;;) {
      shared.work_pipeline.consumer_wait(work_state);
      const Work& work = shared.work[work_state.stage];
      if (uniform(work.batch) == KeyTileWork::kEnd) break;
      is_empty = true;
      if constexpr (Traits::kSumsDscores) DbiasOfKeys<Traits>{shared}.clear();
      if constexpr (Traits::kChunked) ChunkSums<Traits>{args, work, warpgroup}.load(dk, dv);
      shared.k_pipeline.consumer_wait(k_state);
      if constexpr (!kAwaitsValuesLate) shared.v_pipeline.consumer_wait(k_state);
      const int iterations = uniform(work.iterations);
      if (iterations > 0) differentiate(work, iterations);
      if constexpr (Traits::kSumsDscores) store_sums(work);
      consumer_release(shared.k_pipeline.empty[k_state.stage]);
      if (kAwaitsValuesLate && is_empty) shared.v_pipeline.consumer_wait(k_state);
      if constexpr (Traits::kChunked) {
        const auto gradients_of_chunk =
            static_cast<typename Work::Gradients>(uniform(static_cast<int>(work.gradients)));
        if (gradients_of_chunk == Work::Gradients::kPartial) ChunkSums<Traits>{args, work, warpgroup}.store(dk, dv);
        if (gradients_of_chunk == Work::Gradients::kWritten) store(work);
      } else if (is_empty && args.order.kv_group_shares == 1) {
        store_zeros(rows_of(work).dk());
        store_zeros(rows_of(work).dv());
      } else {
        store(work);
      }
      ptx::fence_stores();  // orders stores to V's rows before what the TMA writes there
      consumer_release(shared.v_pipeline.empty[k_state.stage]);
      k_state.advance();
      consumer_release(shared.work_pipeline.empty[work_state.stage]);
      work_state.advance();
    }
  }

 private:
  static constexpr int kWarpRows = 16;
  __device__ __forceinline__ int first_row() const { return warpgroup * tile::kWarpgroupRows; }
  __device__ __forceinline__ int warp_row() const { return first_row() + tile::warp() % 4 * kWarpRows; }

  __device__ __forceinline__ void differentiate(const KeyTileWork& work, int iterations) {
    // The iterations in which queries see only the other warpgroup's keys come before and after the warpgroup's own
    // ones, and are drained. That does not hold where heads come one after the other, each with such iterations, nor
    // where a mask leaves iterations out.
    const TileRange& own = work.own[warpgroup];
    const int group = work.heads;
    const bool descends = work.contributor.direction == LoopDirection::kDescending;
    const bool drains = !Traits::kMasked && (descends || group == 1);
    const int own_iterations = drains ? (own.end - own.begin) * group : iterations;
    const int steps = uniform(!Traits::kMasked && own.empty() ? 0 : own_iterations);
    const int before = uniform(!drains ? 0 : group * (descends ? work.end - own.end : own.begin - work.begin));
    if constexpr (kInRegisters) {
      load_rows(k, shared.k[k_state.stage]);
      load_rows(v, shared.v[k_state.stage]);
    }
    if (steps > 0) {
      drain(before);
      issue_qk_gemm(state, std::true_type{});
      go_to(work, state, std::true_type{});
      ptx::wait_wgmma<0>();
      ptx::pin_registers(scores.c[0]);
      if constexpr (Traits::kOneStep) {
#pragma unroll 1
        for (int i = 1; i <= steps; ++i) step(work, i < steps);
      } else {
#pragma unroll 1
        for (int i = 1; i < steps; ++i) step(work, std::true_type{});
        step(work, std::false_type{});
      }
      drain(iterations - before - steps);
    } else {
      drain(iterations);
    }
  }

  // HasNext: bool, or a type whose value the compiler knows.
  template <class HasNext>
  __device__ __forceinline__ void step(const KeyTileWork& work, HasNext has_next) {
    typename Shared::QueryState next = state;
    next.advance();
    if constexpr (Traits::kCapped) to_gradients.cap(scores);
    if (is_partial) {
      hide(work, shared.iteration(state).query_tile);
      if constexpr (Traits::kCapped) to_gradients.bound(scores);
    }
    if constexpr (Traits::kMasked) unmasked.hide(scores, KeyScores<Traits>::kHidden);
    if constexpr (Traits::kAlibi) add_alibi(work, shared.iteration(state));
    if constexpr (Traits::kKeyBias) add_key_bias(work, shared.iteration(state));
    if constexpr (Traits::kBiased) wait_for_dout();  // and for the bias
    to_gradients.exponentiate(scores, p, state.stage, own_dscores());
    issue_dp_gemm();
    if constexpr (Traits::kDrops) drop();
    issue_dv_gemm();
    // While dV is in flight, P needs registers beside those of dS. Above head dim 64 there are none, so dV is awaited,
    // too.
    ptx::wait_wgmma<kInRegisters ? 1 : 0>();
    ptx::pin_registers(gradients.c[0]);
    if constexpr (!kInRegisters) ptx::pin_registers(dv.c[0]);
    to_gradients.differentiate(dscores, scores, gradients, p, state.stage);
    issue_dk_gemm();
    store_dscores();
    if constexpr (!std::is_same_v<HasNext, std::false_type>) issue_qk_gemm(next, has_next);
    const int done = state.stage;
    go_to(work, next, has_next);
    ptx::wait_wgmma<0>();
    ptx::pin_registers(scores.c[0]);
    ptx::pin_registers(dk.c[0]);
    ptx::pin_registers(dv.c[0]);
    is_empty = false;
    consumer_release(shared.q_pipeline.empty[done]);
  }

  // Reads the description of the next iteration while GEMMs are in flight. If there is none, it reads whatever lies
  // there. The stage is broadcast, because the descriptors of the GEMMs would not be in uniform registers otherwise.
  __device__ __forceinline__ void go_to(const KeyTileWork& work, const typename Shared::QueryState& next,
                                        bool is_there) {
    state = {uniform(next.stage), next.parity};
    is_partial = uniform(shared.iteration(state).is_partial[warpgroup]) != 0;
    if constexpr (Traits::kMasked) {
      if (is_there) read_unmasked(work, shared.iteration(state));
    }
  }

  // Read when S is there, since registers are short while it is in flight.
  __device__ __forceinline__ void add_alibi(const KeyTileWork& work, const typename Traits::Iteration& iteration) {
    const int distance = work.contributor.tile * Traits::kKeys + warp_row() + Scores::row(0) - iteration.first_diagonal;
    if (uniform(iteration.may_cross_diagonal) != 0) to_gradients.mirror_alibi(scores, iteration.slope, distance);
    to_gradients.add_alibi(iteration.slope, distance);
  }

  // Keys that the sequence does not have take the bias of its last key. hide() has made their scores -inf.
  __device__ __forceinline__ void add_key_bias(const KeyTileWork& work, const KeyBiasIteration& iteration) {
    if (uniform(iteration.ignores_scores) != 0) to_gradients.ignore(scores);
    const auto* const of_head = static_cast<const typename Traits::KeyBiasElement*>(iteration.of_head);
#pragma unroll
    for (int r = 0; r < Scores::kThreadRows; ++r) {
      const int key = work.contributor.tile * Traits::kKeys + warp_row() + Scores::row(r);
      const auto of_key = static_cast<float>(of_head[min(key, work.contributor.num_keys - 1)]);
      to_gradients.add_key_bias(r, of_key - iteration.reference, iteration.shift);
    }
  }

  // In cyclic order a phase may have work tiles behind the last key tile.
  __device__ __forceinline__ void store_sums(const KeyTileWork& work) const {
    if (work.contributor.tile >= static_cast<int>(args.order.tiles)) return;
    const int64_t pair = (int64_t{work.batch} * args.params.num_heads_k + work.key_head) * args.order.kv_group_shares +
                         work.kv_group_share;
    DbiasOfKeys<Traits>{shared}.store(args.dscore_sums +
                                      (pair * args.order.tiles + work.contributor.tile) * Traits::kKeys + warp_row());
  }

  __device__ __forceinline__ void read_unmasked(const KeyTileWork& work, const MaskedIteration& iteration) {
    if (!args.mask.has_words && iteration.mask_tile != MaskIterations::Entry::kNothingMasked) {
      unmasked.compute(shared.bounds[state.stage], args.mask.intervals,
                       work.contributor.tile * Traits::kKeys + warp_row());
    } else {
      unmasked.read(args.mask, iteration.mask_tile, static_cast<int>(threadIdx.x) - tile::kWarpgroupSize);
    }
    if (iteration.is_hidden[warpgroup]) unmasked.bits = 0;
  }

  // P of dropped weights becomes 0 while dP is in flight. The draws come when dQ of an earlier iteration is done, so
  // they are not awaited any earlier.
  __device__ __forceinline__ void drop() {
    wait_for_stage();
    to_gradients.drop(p, address_of_draws(shared, state.stage, key_warp()));
  }

  // Waits until the stage of dS is empty. With dropout it also waits for the draws in it, and so in the first round,
  // too.
  __device__ __forceinline__ void wait_for_stage() const {
    ptx::wait(shared.dscore_pipeline.empty[state.stage], Traits::kDrops ? state.parity : state.parity ^ 1);
  }

  // What the GEMM of S (0) or dP (1) adds: the augmented columns of the stage.
  __device__ __forceinline__ auto augmented_step(int which, int stage) const {
    if constexpr (Traits::kConfig.adds_statistics) {
      return tile::AugmentedStep(factors, shared.statistics[0][which], 2 * stage);
    } else {
      return tile::NoAugmentedStep{};
    }
  }

  // If there is no next iteration, the GEMM is wasted on whatever is in the stage.
  __device__ __forceinline__ void issue_qk_gemm(const typename Shared::QueryState& of, bool is_there) {
    if (is_there) shared.q_pipeline.consumer_wait(of);
    const auto q = tile::SmemOperand(shared.q[0]).after(of.stage);
    if constexpr (kInRegisters) {
      tile::issue_rows_gemm(scores, k, q, augmented_step(0, of.stage));
    } else {
      tile::issue_rows_gemm(scores, tile::SmemOperand(shared.k[0]).after(k_state.stage).from_row(first_row()), q,
                            augmented_step(0, of.stage));
    }
  }
  __device__ __forceinline__ void wait_for_dout() const { ptx::wait(shared.dout_full[state.stage], state.parity); }
  __device__ __forceinline__ void issue_dp_gemm() {
    if constexpr (!Traits::kBiased) wait_for_dout();
    const auto dout = tile::SmemOperand(shared.dout[0]).after(state.stage);
    if constexpr (kInRegisters) {
      tile::issue_rows_gemm(gradients, v, dout, augmented_step(1, state.stage));
    } else {
      if (kAwaitsValuesLate && is_empty) shared.v_pipeline.consumer_wait(k_state);
      tile::issue_rows_gemm(gradients, tile::SmemOperand(shared.v[0]).after(k_state.stage).from_row(first_row()), dout,
                            augmented_step(1, state.stage));
    }
  }
  __device__ __forceinline__ void issue_dv_gemm() {
    tile::issue_gemm(dv, p, tile::SmemOperand(shared.dout[0]).after(state.stage), accumulates());
  }
  __device__ __forceinline__ void issue_dk_gemm() {
    tile::issue_gemm(dk, dscores, tile::SmemOperand(shared.q[0]).after(state.stage), accumulates());
  }
  // With query chunks, dK and dV hold the partial sums of earlier chunks, or zeros.
  __device__ __forceinline__ bool accumulates() const { return Traits::kChunked || !is_empty; }

  // Scores that are masked by position, and those of keys that the sequence does not have, become -inf.
  __device__ __forceinline__ void hide(const KeyTileWork& work, int query_tile) {
    const HeadCoord coord = {work.sequence(), 0, work.key_head};
    const int first_key = work.contributor.tile * Traits::kKeys + warp_row();
    const Where where = {args.params, coord, first_key, query_tile * Traits::kQueries};
    where.hide_invisible(scores);
#pragma unroll
    for (int r = 0; r < Scores::kThreadRows; ++r) {
      if (first_key + Scores::row(r) < work.contributor.num_keys) continue;
#pragma unroll
      for (int j = 0; j < Scores::kColumnTiles; ++j) scores.at(r, j, 0) = scores.at(r, j, 1) = -INFINITY;
    }
  }

  // The address that the lane passes to ldmatrix: its row of the warp's 16, and its half of 16 columns.
  template <class Tile>
  __device__ __forceinline__ uint32_t lane_address(const Tile& tile, int step) const {
    const int row = warp_row() + tile::lane() % 16;
    const int chunk = step % 4 * 2 + tile::lane() / 16;
    return ptx::shared_address(&tile) + step / 4 * Tile::kChunkBytes + row * tile::kSmemRowBytes +
           (chunk ^ (row & 7)) * 16;
  }

  // dS -> shared memory.
  __device__ __forceinline__ void store_dscores() const {
    if constexpr (!Traits::kDrops) wait_for_stage();
    own_dscores().store(dscores);
    finish_dscores();
  }
  __device__ __forceinline__ DscoreKeys<Traits> own_dscores() const {
    return {shared.dscores[state.stage], key_warp()};
  }
  // The warp's index among those of the key warpgroups.
  __device__ __forceinline__ static int key_warp() { return tile::warp() - tile::kWarpgroupSize / tile::kWarpSize; }
  __device__ __forceinline__ void finish_dscores() const {
    ptx::fence_stores();
    consumer_release(shared.dscore_pipeline.full[state.stage]);
  }

  // Drains iterations in which queries see only the other warpgroup's keys: the warpgroup's dS is 0.
  __device__ __forceinline__ void drain(int iterations) {
#pragma unroll 1
    for (int i = 0; i < iterations; ++i) drain();
  }
  __device__ __forceinline__ void drain() {
    shared.q_pipeline.consumer_wait(state);
    wait_for_dout();
    wait_for_stage();
    own_dscores().clear();
    finish_dscores();
    if (tile::lane() == 0) ptx::arrive(shared.q_pipeline.empty[state.stage]);
    state.advance();
    __syncwarp();
  }

  // A warp's 16 keys as a left operand.
  template <class Packed, class Tile>
  __device__ __forceinline__ void load_rows(Packed& packed, const Tile& tile) const {
#pragma unroll
    for (int step = 0; step < Packed::kSteps; ++step) ptx::load_matrix_x4(packed.a[step], lane_address(tile, step));
  }

  __device__ __forceinline__ void store(const Work& work) {
    if constexpr (Traits::kMasked) {
      if (work.partials > 1) {
        clear_if_empty();
        if (first_key_of(work) < work.contributor.num_keys &&
            !combine_partials<Traits>(KeyTileSums<Traits>{args, work, warpgroup}, dk, dv, shared.arrived[warpgroup])) {
          return;
        }
      }
    } else if (args.order.kv_group_shares > 1) {
      clear_if_empty();
      if (first_key_of(work) < work.contributor.num_keys &&
          !combine_partials<Traits>(KvGroupShareSums<Traits>{args, work, warpgroup}, dk, dv,
                                    shared.arrived[warpgroup])) {
        return;
      }
    }
    sync_key_warpgroup(warpgroup);  // no thread still reads V
    dk.scale(args.gradient_scale);
    dv.scale(to_gradients.factor());
    // The rows are staged in the warp's rows of V.
    auto& staging = shared.v[k_state.stage];
    const bool needs_recompute = store_row_lines(rows_of(work).dk(), dk, staging, warp_row()) |
                                 store_row_lines(rows_of(work).dv(), dv, staging, warp_row());
    if (needs_recompute) rows_of(work).nan_flag() = 1;
    __syncwarp();  // reconverges the warp: otherwise ptxas keeps no descriptor in uniform registers
  }
  __device__ __forceinline__ void clear_if_empty() {
    if (!accumulates()) {
      dk.clear();
      dv.clear();
    }
  }
  __device__ __forceinline__ int first_key_of(const KeyTileWork& work) const {
    return work.contributor.tile * Traits::kKeys + first_row();
  }
  __device__ __forceinline__ KeyGradientRows<Traits> rows_of(const KeyTileWork& work) const {
    return {args, work, warpgroup};
  }
};

}  // namespace flash_attn_ext::sm90
