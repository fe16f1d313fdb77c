// A consumer warpgroup. The tiles of 64 queries of a CTA's work tiles go to its consumers round-robin.
//
//   S = Q K^T;  P = exp2(c S - c max S);  O = P V / sum P.
//
// A key bias, or ALiBi, divided by the scale is added to S before.
// All keys fit one tile, so this is an ordinary softmax, not an online one. Where registers hold the scores of a part
// of the keys only, O is rescaled between parts.
#pragma once

#include <utility>

#include "kernels/score/score_tile.cuh"
#include "kernels/sm90/forward/row_softmax.cuh"
#include "kernels/sm90/forward/single_tile/epilogue.cuh"
#include "kernels/sm90/kernel.cuh"

namespace flash_attn_ext::sm90 {

template <class Traits>
struct SingleTileConsumer {
  using Element = typename Traits::Element;
  using Scores = typename Traits::Scores;
  using Shared = SingleTileShared<Traits>;
  static constexpr int kKeyParts = Traits::kConfig.parts;

  const SingleTileArguments& args;
  Shared& shared;
  const int warpgroup;

  typename Shared::WorkPipeline::State work_state{};
  typename Shared::QueryPipeline::State q_state{};
  int own = warpgroup;  // the work tile's next tile of queries for this warpgroup
  Scores scores;
  tile::PackedRows<Traits::kPartKeys> p;
  typename Traits::Output out;
  RowSoftmax<false> softmax;
  float slope = 0.0f;  // of the tile of queries that find() found last

  __device__ __forceinline__ void run() {
    bool more = find();
    if (more) issue_qk_gemm(more, 0);
#pragma unroll 1
    while (more) {
      attend(std::make_integer_sequence<int, kKeyParts - 1>{});
      const ResultRows rows = result_rows(args, shared.work_tile[work_state.stage], own);
      own += Shared::kWarpgroups;
      more = find();
      if constexpr (Traits::kConfig.intra_overlap) issue_qk_gemm(more, 0);
      finish(rows);
      if constexpr (!Traits::kConfig.intra_overlap) issue_qk_gemm(more, 0);
    }
    ptx::wait_wgmma<0>();
    if (tile::lane() == 0) ptx::wait_until_written();  // results may be overwritten now, and the CTA may end
    __syncwarp();
    if (shared.any_flagged[result_warp()]) repair_flagged<Traits>(args, warpgroup);
  }

 private:
  // Advances to the next tile of queries, and releases work tiles that have none left. Returns false at the end.
  __device__ __forceinline__ bool find() {
#pragma unroll 1
    for (;;) {
      shared.work_pipeline.consumer_wait(work_state);
      const int tiles = uniform(shared.work_tile[work_state.stage].query_tiles);
      if (tiles == 0) return false;
      if (own < tiles) {
        if constexpr (Traits::kAlibi) find_slope(shared.work_tile[work_state.stage].coord);
        return true;
      }
      own -= tiles;
      consumer_release(shared.work_pipeline.empty[work_state.stage]);
      work_state.advance();
    }
  }

  // Loads the slope of the work tile's head. Nothing uses it before the QK GEMM has been issued.
  __device__ __forceinline__ void find_slope(const HeadCoord& coord) {
    slope = args.params.score_mod.alibi.at<float>(coord.sequence.batch, coord.head);
  }

  template <int... kBefore>
  __device__ __forceinline__ void attend(std::integer_sequence<int, kBefore...>) {
    weigh<0>();
    p.pack(scores, Element{});
    (attend_part<kBefore + 1>(), ...);
    if constexpr (kKeyParts == 1) await_values();
    issue_pv_gemm(kKeyParts - 1);
    finish_values();
  }

  // Computes the scores of a part of the keys while the GEMM of the preceding part adds to O.
  template <int kPart>
  __device__ __forceinline__ void attend_part() {
    issue_qk_gemm(false, kPart);
    if constexpr (kPart == 1) await_values();
    issue_pv_gemm(kPart - 1);
    weigh<kPart>([&](float computed) {
      ptx::compute_before_wait(computed);
      finish_values();
    });
    softmax.rescale(out);
    p.pack(scores, Element{});
  }

  // At the end, where `arrives` is false, the GEMM reads stale data: a branch around it would make ptxas wait for each
  // wgmma.
  __device__ __forceinline__ void issue_qk_gemm(bool arrives, int part) {
    if (arrives) {
      shared.queries[warpgroup].consumer_wait(q_state);
      ptx::wait(shared.k_full[work_state.stage], work_state.parity);
    }
    const auto q = tile::SmemOperand<typename Traits::QTile>(shared.q[0][0]);
    const auto k = tile::SmemOperand<typename Traits::KTile>(shared.k[0]).after(work_state.stage);
    tile::issue_wide_gemm(scores, q.after(warpgroup * Shared::kQueryStages + q_state.stage),
                          k.from_row(part * Traits::kPartKeys).template as<typename Traits::KPart>(), key_bias(part));
  }
  // What the QK GEMM adds. Adding -inf to a NaN leaves a NaN, whose row is recomputed.
  __device__ __forceinline__ auto key_bias([[maybe_unused]] int part) const {
    if constexpr (Traits::kKeyBias) {
      return tile::SharedAugmentedStep(shared.key_bias.factors, shared.key_bias.columns[0], work_state.stage,
                                       part * Traits::kPartKeys);
    } else {
      return tile::NoAugmentedStep{};
    }
  }

  // scores -> P. overlapped: as in RowSoftmax::update, for the parts after the first.
  template <int kPart, class Overlapped = NothingOverlapped>
  __device__ __forceinline__ void weigh(Overlapped&& overlapped = {}) {
    ptx::wait_wgmma<kPart == 0 ? 0 : 1>();
    ptx::pin_registers(scores.c[0]);
    if constexpr (kPart == kKeyParts - 1) release_queries();
    if constexpr (Traits::kAlibi) add_alibi<kPart>(shared.work_tile[work_state.stage]);
    hide_invisible<kPart>(shared.work_tile[work_state.stage]);
    const Exponent exponent = {true, args.scale_log2e};
    if constexpr (kPart == 0) {
      softmax.template begin<Rescale::kAboveThreshold>(scores, exponent);
    } else {
      softmax.template update<Rescale::kAboveThreshold>(scores, exponent, 0.0f, overlapped);
    }
  }

  // Adds ALiBi divided by the scale, since the softmax multiplies scores by the scale.
  template <int kPart>
  __device__ __forceinline__ void add_alibi(const WorkTile& work_tile) {
    const attention::Sequence& sequence = work_tile.coord.sequence;
    const int first_query = work_tile.first_query + own_row(own) + Scores::row(0);
    const int diagonal = static_cast<int>(args.params.visibility.diagonal(sequence));
    const float factor = slope / static_cast<float>(args.params.score_mod.scale);
    const auto first = static_cast<float>(kPart * Traits::kPartKeys + Scores::column(0, 0) - first_query - diagonal);
#pragma unroll
    for (int j = 0; j < Scores::kColumnTiles; ++j) {
#pragma unroll
      for (int r = 0; r < Scores::kThreadRows; ++r) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float distance = first + static_cast<float>(Scores::column_step(j, e) - Scores::row_step(r));
          scores.at(r, j, e) = fmaf(factor, attention::alibi_derivative(distance), scores.at(r, j, e));
        }
      }
    }
  }

  template <int kPart>
  __device__ __forceinline__ void hide_invisible(const WorkTile& work_tile) {
    constexpr int kFirst = kPart * Traits::kPartKeys;
    constexpr int kLeast =
        keys_of_row_above(Traits::kConfig);  // without padding, calls with fewer keys take kernels with smaller tiles
    // A key bias has hidden the keys that the sequence does not have.
    const int keys = Traits::kKeyBias ? Traits::kKeys : static_cast<int>(work_tile.coord.sequence.num_keys);
    const ScoreTile<Rows::kQueries, Scores> where = {args.params, work_tile.coord,
                                                     int64_t{work_tile.first_query} + own_row(own), kFirst};
    if (!args.params.visibility.unlimited() || (kKeyParts > 1 && keys < kLeast)) {
      where.hide_invisible(scores);
    } else if (keys < kLeast) {
      where.template hide_absent<0>(scores);
    } else if (keys < kFirst + Traits::kPartKeys) {
      where.template hide_absent<(kLeast > kFirst ? (kLeast - kFirst) / 8 : 0)>(scores);
    }
  }

  __device__ __forceinline__ void await_values() { ptx::wait(shared.v_full[work_state.stage], work_state.parity); }
  __device__ __forceinline__ void issue_pv_gemm(int part) {
    const auto v = tile::SmemOperand<typename Traits::VTile>(shared.v[0]).after(work_state.stage);
    tile::issue_gemm(out, p, v.from_row(part * Traits::kPartKeys).template as<typename Traits::VPart>(), part > 0);
  }
  __device__ __forceinline__ void finish_values() {
    ptx::wait_wgmma<0>();
    ptx::pin_registers(out.c[0]);
  }

  // One thread arrives for the warpgroup: its wait for the GEMM has synchronised the others.
  __device__ __forceinline__ void release_queries() {
    if (threadIdx.x % tile::kWarpgroupSize == 0) ptx::arrive(shared.queries[warpgroup].empty[q_state.stage]);
    q_state.advance();
  }

  __device__ __forceinline__ void finish(const ResultRows& rows) {
    const Repair repair = store_result<Traits>(args, rows, out, softmax, shared.out[warpgroup]);
    if (tile::lane() == 0) {
      *rows.repair_flag = static_cast<uint8_t>(repair);
      if (repair != Repair::kNone) shared.any_flagged[result_warp()] = true;
    }
    __syncwarp();
  }
};

}  // namespace flash_attn_ext::sm90
