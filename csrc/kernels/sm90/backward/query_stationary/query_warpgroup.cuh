// A warpgroup of the query-stationary backward pass: it computes P, dS and dQ of 64 queries, which stay. Of each key
// tile the first warpgroup computes dV, and the second one dK, both for all queries. Rows are queries:
//
//   P = exp2(c S - lse), dS = P (dP - delta)  |  P and dS -> shared memory
//   S = Q K^T and dP = dO V^T of the next tile, while dV or dK of the previous one goes to memory
//   dQ += dS K, and dV = P^T dO or dK = dS^T Q, while P and dS of the next tile are computed
#pragma once

#include <type_traits>

#include "kernels/score/score_tile.cuh"
#include "kernels/sm90/backward/query_stationary/traits.h"
#include "kernels/sm90/kernel.cuh"
#include "kernels/sm90/staged_rows.cuh"
#include "ptx/math.h"
#include "ptx/pin.h"
#include "ptx/stmatrix.h"
#include "tile/sm90/register_order.h"

namespace flash_attn_ext::sm90 {

// Which of a thread's queries attend to which of its keys, by the boolean mask.
template <class Scores>
struct MaskOfQueries {
  static_assert(attention::MaskBits::kKeys == 2 * 8 * Scores::kColumnTiles && Scores::kThreadRows == 2);

  uint32_t first;  // the word of the thread's keys in the first tile, of its first query
  int to_second;   // from there to the word of its second query
  uint32_t bits;   // of a tile: 16 for each query

  __device__ __forceinline__ void begin(const attention::BackwardParams& p, int batch, int head, int first_query) {
    const attention::MaskBits& mask = p.score_mod.mask_bits;
    const auto last = static_cast<int>(p.sequences.max_seqlen_q) - 1;
    const int query = min(first_query + Scores::row(0), last);
    first = static_cast<uint32_t>(batch * mask.batch_stride + head * mask.head_stride + query * mask.query_stride) +
            tile::lane() % 4;
    to_second = (min(first_query + Scores::row(1), last) - query) * static_cast<int>(mask.query_stride);
  }

  // Four words of a row hold the bits of two tiles.
  __device__ __forceinline__ void read(const attention::MaskBits& mask, int tile) {
    const int shift = tile % 2 * 16;
    const uint32_t* const word = mask.data + (first + tile / 2 * 4);
    bits = __byte_perm(word[0] >> shift, word[to_second] >> shift, 0x5410);
  }

  // Masked scores become -inf.
  __device__ __forceinline__ void hide(Scores& scores) const {
    constexpr uint32_t kAll = 0xFFFFFFFFu;
    if (__all_sync(kAll, bits == kAll)) return;
    const uint32_t unmasked = ptx::pin(bits);
    // The loop has the order of the bits: ptxas then moves several of them into predicates at a time.
#pragma unroll
    for (int bit = 0; bit < 32; ++bit) {
      float& score = scores.at(bit / 16, bit / 2 % 8, bit % 2);
      score = (unmasked & 1u << bit) != 0 ? score : -INFINITY;
    }
  }
};

template <class Traits>
struct QueryStationaryWarpgroup {
  using Element = typename Traits::Element;
  using Shared = QueryStationaryShared<Traits>;
  using Scores = typename Traits::Scores;
  using Sums = typename Traits::Sums;
  using Packed = tile::PackedRows<Traits::kKeys>;
  using KeyState = typename decltype(Shared::k_pipeline)::State;
  static constexpr int kFlags = Traits::kKeys / 16;  // of a key tile
  static constexpr int kConsumersBarrier = 1;        // a named barrier; barrier 0 is __syncthreads
  struct NoMask {};

  const QueryStationaryArguments& args;
  Shared& shared;
  const int warpgroup;

  Scores scores;
  Scores gradients;  // dP
  Sums dq;
  Sums key_sums;  // dV or dK
  float lse[Scores::kThreadRows];
  float delta[Scores::kThreadRows];
  ptx::TmaCoordinate target;  // the warp's rows of dV or dK of the previous tile
  int nan_flag;               // the warp's, of that tile
  bool has_before;            // whether the segment has a previous tile
  typename decltype(Shared::query_pipeline)::State query_state{};
  KeyState key_state{};                  // of S and dP
  int sums_stage = Shared::kStages - 1;  // of K, of the last tile whose GEMMs of dQ, dV and dK were issued
  int score_stage = 0;                   // of the next P and dS
  std::conditional_t<Traits::kMasked, MaskOfQueries<Scores>, NoMask> mask;  // of the tile whose P comes next

  __device__ __forceinline__ void run() {
    for_each_segment(args, shared.span, [&](const Segment& segment) { attend(segment); });
    if (ptx::elect()) ptx::wait_until_written();
  }

 private:
  // The tile after the one whose P and dS are computed. Until store(), `target` belongs to the one before that.
  __device__ __forceinline__ int next_tile() const { return (target.row + Traits::kKeys) / Traits::kKeys + 1; }
  __device__ __forceinline__ bool has_values() const { return warpgroup == 0; }  // dV, not dK
  __device__ __forceinline__ int first_row() const { return warpgroup * tile::kWarpgroupRows; }
  __device__ __forceinline__ static int warp_row() { return tile::warp() % 4 * 16; }
  __device__ __forceinline__ static void sync_warpgroups() {
    ptx::sync_named(kConsumersBarrier, Traits::kComputingThreads);
  }

  __device__ __forceinline__ void attend(const Segment& segment) {
    read_statistics(segment);
    find_target(segment);
    if constexpr (Traits::kMasked) {
      mask.begin(args.params, segment.batch, segment.head, first_row() + warp_row());
      mask.read(args.params.score_mod.mask_bits, segment.tile);
    }
    if (segment.tile == 0 && tile::lane() == 0) dq_nan_flag(segment.pair) = 0;
    has_before = false;
    dq.clear();
    key_sums.clear();
    shared.query_pipeline.consumer_wait(query_state);
    issue_score_gemms();
    wait_for_scores<0>();
#pragma unroll 1
    for (int left = segment.count; left > 1; --left) step(std::true_type{});
    step(std::false_type{});
    wait_for_sums();
    consumer_release(shared.query_pipeline.empty[query_state.stage]);
    query_state.advance();
    sync_warpgroups();  // no thread still reads P and dS
    store();
    store_partial(segment.pair);
  }

  __device__ __forceinline__ const TmaDescriptor& gradient() const { return has_values() ? args.dv : args.dk; }
  __device__ __forceinline__ bool is_store_enabled() const {
    return (has_values() ? args.params.dv.data : args.params.dk.data) != nullptr;
  }

  __device__ __forceinline__ void find_target(const Segment& segment) {
    const TmaDescriptor& map = gradient();
    target = {.column = 0,
              .row = (segment.tile - 1) * Traits::kKeys + warp_row(),
              .head = segment.head * map.head_step,
              .batch = segment.batch * map.batch_step};
    nan_flag = (segment.pair * args.tiles + segment.tile - 1) * kFlags + tile::warp() % 4;
  }

  // P of a query that does not exist vanishes without a branch, as that of a query that sees no key.
  __device__ __forceinline__ void read_statistics(const Segment& segment) {
    const attention::BackwardParams& p = args.params;
#pragma unroll
    for (int r = 0; r < Scores::kThreadRows; ++r) {
      const int row = first_row() + warp_row() + Scores::row(r);
      const bool exists = row < p.sequences.max_seqlen_q;
      const float own = exists ? *p.lse.at<const float>(segment.batch, segment.head, row) : -INFINITY;
      lse[r] = own == -INFINITY ? INFINITY : own * kLog2e;
      // The dlse of a query that sees no key may be anything.
      const bool has_delta = Traits::kMasked ? own != -INFINITY : exists;
      delta[r] = has_delta ? *p.delta.at<const float>(segment.batch, segment.head, row) : 0.0f;
    }
  }

  __device__ __forceinline__ void issue_score_gemms() {
    shared.k_pipeline.consumer_wait(key_state);
    tile::issue_rows_gemm(scores, tile::SmemOperand(shared.q).from_row(first_row()),
                          tile::SmemOperand(shared.k[0]).after(key_state.stage));
    shared.v_pipeline.consumer_wait(key_state);
    tile::issue_rows_gemm(gradients, tile::SmemOperand(shared.dout).from_row(first_row()),
                          tile::SmemOperand(shared.v[0]).after(key_state.stage));
  }

  // kBehind: the GEMMs that were issued after them.
  template <int kBehind>
  __device__ __forceinline__ void wait_for_scores() {
    ptx::wait_wgmma<kBehind>();
    ptx::pin_registers(scores.c[0]);
    ptx::pin_registers(gradients.c[0]);
    consumer_release(shared.v_pipeline.empty[key_state.stage]);
    key_state.advance();
    key_state.stage = uniform(key_state.stage);
  }

  // Waits for dQ, and dV or dK, of the previous tile.
  __device__ __forceinline__ void wait_for_sums() {
    ptx::wait_wgmma<0>();
    ptx::pin_registers(dq.c[0]);
    ptx::pin_registers(key_sums.c[0]);
    __syncwarp();
    if (has_before && tile::lane() == 0) ptx::arrive(shared.k_pipeline.empty[sums_stage]);
  }

  // Processes a tile whose S and dP are complete. Its P and dS are computed while the GEMMs of dQ, dV and dK of the
  // previous tile are in flight. The results of these are stored while S and dP of the next tile are in flight.
  template <class HasNext>
  __device__ __forceinline__ void step(HasNext) {
    differentiate();
    if constexpr (Traits::kMasked && HasNext::value) mask.read(args.params.score_mod.mask_bits, next_tile());
    if (has_values() && tile::lane() == 0) args.dkdv_nan_flags[nan_flag + kFlags] = 0;  // before any warp sets it
    wait_for_sums();
    ptx::fence_stores();
    sync_warpgroups();
    if constexpr (HasNext::value) issue_score_gemms();
    store();
    sums_stage = uniform(sums_stage + 1 == Shared::kStages ? 0 : sums_stage + 1);
    issue_sum_gemms();
    score_stage = uniform(score_stage ^ 1);
    has_before = true;
    if constexpr (HasNext::value) wait_for_scores<2>();
  }

  __device__ __forceinline__ void issue_sum_gemms() {
    const auto stage = tile::SmemOperand(shared.scores[0]).after(score_stage);
    const auto weights = stage.template as<typename Traits::ScoreTile>();
    const auto dscores = weights.after(1);
    tile::add_gemm(dq, dscores.from_row(first_row()), tile::SmemOperand(shared.k[0]).after(sums_stage));
    tile::issue_transposed_gemm(key_sums, has_values() ? weights : dscores,
                                tile::SmemOperand(has_values() ? shared.dout : shared.q));
  }

  // S and dP -> P and dS, in shared memory. dS is computed from P before P is rounded.
  __device__ __forceinline__ void differentiate() {
    const uint32_t weights = lane_address(shared.scores[score_stage].weights);
    const uint32_t differences = lane_address(shared.scores[score_stage].dscores);
    if constexpr (Traits::kMasked) mask.hide(scores);
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
    if (ptx::elect()) ptx::wait_until_read();  // dV or dK, which were staged there
    __syncwarp();
#pragma unroll
    for (int step = 0; step < Packed::kSteps; ++step) {
      constexpr uint32_t kStepBytes = 32;
      ptx::store_matrix_x4(weights ^ step * kStepBytes, p.a[step]);
      ptx::store_matrix_x4(differences ^ step * kStepBytes, dscores.a[step]);
    }
  }

  // The address that the lane passes to stmatrix: its row of the warp's 16, and its half of 16 keys. The addresses of
  // other keys differ in bits of the swizzle.
  __device__ __forceinline__ uint32_t lane_address(const typename Traits::ScoreTile& tile) const {
    const int lane = tile::lane();
    return ptx::shared_address(&tile) + (first_row() + warp_row() + lane % 16) * tile::kSmemRowBytes +
           (lane / 16 ^ lane % 8) * 16;
  }

  // Stores dV or dK of the previous tile. Each warp stages its rows where it had its rows of P and dS. L2 evicts them
  // first, because nothing reads them again.
  __device__ __forceinline__ void store() {
    key_sums.scale(has_values() ? 1.0f : args.scale);
    auto& staging = shared.scores[score_stage ^ 1].staging();
    const int row = first_row() + warp_row();
    const auto found = stage_rows<Element>(key_sums, staging, row);
    if (found.of(0) || found.of(1)) args.dkdv_nan_flags[nan_flag] = 1;
    ptx::fence_stores();
    __syncwarp();
    if (has_before && is_store_enabled() && ptx::elect()) {
#pragma unroll
      for (int chunk = 0; chunk < Traits::Staging::kChunks; ++chunk) {
        ptx::TmaCoordinate at = target;
        at.column = chunk * tile::kSmemChunkColumns;
        ptx::store_box(gradient().map, ptx::shared_address(staging.data[chunk][row]), at, ptx::evict_first());
      }
      ptx::commit_stores();
    }
    __syncwarp();
    target.row += Traits::kKeys;
    nan_flag += kFlags;
  }

  // Stores the partial dQ of the segment.
  __device__ __forceinline__ void store_partial(int pair) const {
    const int64_t split = WorkListShares::split_index(blockIdx.x, pair);
    float* const to =
        args.dq_partials + split * Traits::kDqPartialFloats + warpgroup * (Traits::kDqPartialFloats / 2) +
        ptx::pin(static_cast<int>(threadIdx.x)) % tile::kWarpgroupSize * 4;  // pinned: not kept in between
    tile::RegisterOrder<Sums>::store(to, dq);
  }

  __device__ __forceinline__ uint8_t& dq_nan_flag(int pair) const {
    return args.dq_nan_flags[pair * QueryStationaryArguments::kQueryFlags + warpgroup * 4 + tile::warp() % 4];
  }
};

}  // namespace flash_attn_ext::sm90
