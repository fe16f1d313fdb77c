// A warpgroup that computes P, dS and dQ of 64 queries, which stay, and of each tile of keys dV (the first warpgroup)
// or dK (the second one) of all queries. Rows are queries:
//
//   P = exp2(c S - lse), dS = P (dP - delta)  |  P and dS -> shared memory
//   S = Q K^T and dP = dO V^T of the next tile, while dV or dK of the one before goes to memory
//   dQ += dS K, and dV = P^T dO or dK = dS^T Q, while P and dS of the next tile are computed
#pragma once

#include <type_traits>

#include "kernels/score/score_tile.cuh"
#include "kernels/sm90/backward_few_queries/traits.h"
#include "kernels/sm90/send_rows.cuh"
#include "kernels/sm90/uniform.h"
#include "ptx/elect.h"
#include "ptx/math.h"
#include "ptx/pin.h"
#include "ptx/stmatrix.h"

namespace flash_attn_ext::sm90 {

template <class Traits>
struct FewQueriesWarpgroup {
  using Element = typename Traits::Element;
  using Shared = FewQueriesShared<Traits>;
  using Scores = typename Traits::Scores;
  using Sums = typename Traits::Sums;
  using Packed = tile::PackedRows<Traits::kKeys>;
  using KeyPosition = typename decltype(Shared::k_ring)::Position;
  static constexpr int kFlags = Traits::kKeys / 16;  // of a tile of keys

  const FewQueriesArguments& args;
  Shared& shared;
  const int warpgroup;

  Scores scores;
  Scores gradients;  // dP
  Sums dq;
  Sums key_sums;  // dV or dK
  float lse[Scores::kThreadRows];
  float delta[Scores::kThreadRows];
  ptx::BoxOrigin target;  // the warp's rows of dV or dK of the tile before
  int nan_flag;           // the warp's, of that tile
  bool has_before;        // whether the segment has a tile before
  typename decltype(Shared::query_ring)::Position query_at{};
  KeyPosition key_at{};                  // of S and dP
  int sums_stage = Shared::kStages - 1;  // of K, of the last tile whose dQ, dV and dK were started
  int score_stage = 0;                   // of the next P and dS

  __device__ __forceinline__ void run() {
    for_each_segment(args, shared.stretch, [&](const Segment& segment) { attend(segment); });
    if (ptx::elect()) ptx::wait_until_written();
  }

 private:
  __device__ __forceinline__ bool has_values() const { return warpgroup == 0; }  // dV, not dK
  __device__ __forceinline__ int first_row() const { return warpgroup * tile::kWarpgroupRows; }
  __device__ __forceinline__ static int warp_row() { return tile::warp() % 4 * 16; }
  __device__ __forceinline__ static void meet() { ptx::sync_named(1, Traits::kComputingThreads); }

  __device__ __forceinline__ void attend(const Segment& segment) {
    read_statistics(segment);
    find_target(segment);
    if (segment.tile == 0 && tile::lane() == 0) dq_nan_flag(segment.pair) = 0;
    has_before = false;
    dq.clear();
    key_sums.clear();
    shared.query_ring.wait_full(query_at);
    start_scores();
    wait_for_scores<0>();
#pragma unroll 1
    for (int left = segment.count; left > 1; --left) step(std::true_type{});
    step(std::false_type{});
    wait_for_sums();
    release(shared.query_ring.empty[query_at.stage]);
    query_at.advance();
    meet();  // P and dS have no readers any more
    store();
    leave(segment.pair);
  }

  __device__ __forceinline__ const OperandMap& gradient() const { return has_values() ? args.dv : args.dk; }
  __device__ __forceinline__ bool is_wanted() const {
    return (has_values() ? args.params.dv.data : args.params.dk.data) != nullptr;
  }

  __device__ __forceinline__ void find_target(const Segment& segment) {
    const OperandMap& map = gradient();
    target = {.column = 0,
              .row = (segment.tile - 1) * Traits::kKeys + warp_row(),
              .head = segment.head * map.head_step,
              .batch = segment.batch * map.batch_step};
    nan_flag = (segment.pair * args.tiles + segment.tile - 1) * kFlags + tile::warp() % 4;
  }

  // Of a query that is not there P vanishes without a branch, as of one that sees no key.
  __device__ __forceinline__ void read_statistics(const Segment& segment) {
    const attention::BackwardParams& p = args.params;
#pragma unroll
    for (int r = 0; r < Scores::kThreadRows; ++r) {
      const int row = first_row() + warp_row() + Scores::row(r);
      const bool exists = row < p.sequences.max_seqlen_q;
      const float own = exists ? *p.lse.at<const float>(segment.batch, segment.head, row) : -INFINITY;
      lse[r] = own == -INFINITY ? INFINITY : own * kLog2e;
      delta[r] = exists ? *p.delta.at<const float>(segment.batch, segment.head, row) : 0.0f;
    }
  }

  // By all warps that have read what the barrier stands for.
  __device__ __forceinline__ static void release(ptx::Barrier& barrier) {
    __syncwarp();
    if (tile::lane() == 0) ptx::arrive(barrier);
  }

  __device__ __forceinline__ void start_scores() {
    shared.k_ring.wait_full(key_at);
    tile::start_rows_product(scores, tile::BoxOperand(shared.q).from_row(first_row()),
                             tile::BoxOperand(shared.k[0]).after(key_at.stage));
    shared.v_ring.wait_full(key_at);
    tile::start_rows_product(gradients, tile::BoxOperand(shared.dout).from_row(first_row()),
                             tile::BoxOperand(shared.v[0]).after(key_at.stage));
  }

  // kBehind: products that were started after them.
  template <int kBehind>
  __device__ __forceinline__ void wait_for_scores() {
    ptx::wait_products<kBehind>();
    ptx::pin_registers(scores.c[0]);
    ptx::pin_registers(gradients.c[0]);
    release(shared.v_ring.empty[key_at.stage]);
    key_at.advance();
    key_at.stage = uniform(key_at.stage);
  }

  // dQ, and dV or dK, of the tile before.
  __device__ __forceinline__ void wait_for_sums() {
    ptx::wait_products<0>();
    ptx::pin_registers(dq.c[0]);
    ptx::pin_registers(key_sums.c[0]);
    __syncwarp();
    if (has_before && tile::lane() == 0) ptx::arrive(shared.k_ring.empty[sums_stage]);
  }

  // A tile whose S and dP are there. Its P and dS are computed while the sums of the tile before are in flight, and
  // these leave while S and dP of the next one are.
  template <class HasNext>
  __device__ __forceinline__ void step(HasNext) {
    differentiate();
    if (has_values() && tile::lane() == 0) args.dkdv_nan_flags[nan_flag + kFlags] = 0;  // before anybody sets it
    wait_for_sums();
    ptx::fence_stores();
    meet();
    if constexpr (HasNext::value) start_scores();
    store();
    sums_stage = uniform(sums_stage + 1 == Shared::kStages ? 0 : sums_stage + 1);
    start_sums();
    score_stage = uniform(score_stage ^ 1);
    has_before = true;
    if constexpr (HasNext::value) wait_for_scores<2>();
  }

  __device__ __forceinline__ void start_sums() {
    const auto stage = tile::BoxOperand(shared.scores[0]).after(score_stage);
    const auto weights = stage.template as<typename Traits::ScoreTile>();
    const auto dscores = weights.after(1);
    tile::add_product(dq, dscores.from_row(first_row()), tile::BoxOperand(shared.k[0]).after(sums_stage));
    tile::start_transposed_product(key_sums, has_values() ? weights : dscores,
                                   tile::BoxOperand(has_values() ? shared.dout : shared.q));
  }

  // S and dP -> P and dS, to shared memory. dS is made of P as it was before it is rounded.
  __device__ __forceinline__ void differentiate() {
    const uint32_t weights = lane_address(shared.scores[score_stage].weights);
    const uint32_t differences = lane_address(shared.scores[score_stage].dscores);
#pragma unroll
    for (int j = 0; j < Scores::kColumnTiles; ++j) {
#pragma unroll
      for (int r = 0; r < Scores::kThreadRows; ++r) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float weight = ptx::exp2(fmaf(scores.at(r, j, e), args.scale_log2e, -lse[r]));
          scores.at(r, j, e) = weight;
          gradients.at(r, j, e) = weight * (gradients.at(r, j, e) - delta[r]);
        }
      }
    }
    Packed p;
    Packed dscores;
    p.pack(scores, Element{});
    dscores.pack(gradients, Element{});
    if (ptx::elect()) ptx::wait_until_read();  // dV or dK that lay there
    __syncwarp();
#pragma unroll
    for (int step = 0; step < Packed::kSteps; ++step) {
      constexpr uint32_t kStepBytes = 32;
      ptx::store_matrix_x4(weights ^ step * kStepBytes, p.a[step]);
      ptx::store_matrix_x4(differences ^ step * kStepBytes, dscores.a[step]);
    }
  }

  // The lane's row of the warp's 16 and its half of 16 keys, as stmatrix wants them. Those of other keys differ in bits
  // of the swizzle.
  __device__ __forceinline__ uint32_t lane_address(const typename Traits::ScoreTile& tile) const {
    const int lane = tile::lane();
    return ptx::shared_address(&tile) + (first_row() + warp_row() + lane % 16) * tile::kBoxRowBytes +
           (lane / 16 ^ lane % 8) * 16;
  }

  // dV or dK of the tile before, each warp's where it had its rows of P and dS. L2 is for what is read again.
  __device__ __forceinline__ void store() {
    key_sums.scale(has_values() ? 1.0f : args.scale);
    auto& staging = shared.scores[score_stage ^ 1].staging();
    const int row = first_row() + warp_row();
    const RowSuspicion found = stage_rows<Element>(key_sums, staging, row);
    if (found.of(0) || found.of(1)) args.dkdv_nan_flags[nan_flag] = 1;
    ptx::fence_stores();
    __syncwarp();
    if (has_before && is_wanted() && ptx::elect()) {
#pragma unroll
      for (int chunk = 0; chunk < Traits::Staging::kChunks; ++chunk) {
        ptx::BoxOrigin at = target;
        at.column = chunk * tile::kBoxColumns;
        ptx::store_box(gradient().map, ptx::shared_address(staging.data[chunk][row]), at, ptx::evict_first());
      }
      ptx::commit_stores();
    }
    __syncwarp();
    target.row += Traits::kKeys;
    nan_flag += kFlags;
  }

  // dQ of the segment.
  __device__ __forceinline__ void leave(int pair) const {
    constexpr int kThreads = tile::kWarpgroupSize;
    const int64_t part = LineShares::part_number(blockIdx.x, pair);
    float* const to = args.dq_parts + part * Traits::kPartFloats + warpgroup * (Traits::kPartFloats / 2) +
                      ptx::pin(static_cast<int>(threadIdx.x)) % kThreads * 4;  // pinned: not kept in between
#pragma unroll
    for (int j = 0; j < Sums::kColumnTiles; ++j) {
      const float(&c)[4] = dq.c[0][j];
      *reinterpret_cast<float4*>(to + j * kThreads * 4) = {c[0], c[1], c[2], c[3]};
    }
  }

  __device__ __forceinline__ uint8_t& dq_nan_flag(int pair) const {
    return args.dq_nan_flags[pair * FewQueriesArguments::kQueryFlags + warpgroup * 4 + tile::warp() % 4];
  }
};

}  // namespace flash_attn_ext::sm90
