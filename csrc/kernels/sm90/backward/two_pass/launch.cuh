// Launches the kernels of a two-pass backward pass.
#pragma once

#include <algorithm>

#include "kernels/common/launch/launch_early.cuh"
#include "kernels/common/launch/with_row.h"
#include "kernels/common/repair/repair.h"
#include "kernels/plan/plan.h"
#include "kernels/sm90/backward/two_pass/dbias_from_tiles.cuh"
#include "kernels/sm90/backward/two_pass/prepare.cuh"
#include "kernels/sm90/backward/two_pass/two_pass.cuh"
#include "kernels/sm90/backward/two_pass/two_pass_wide.cuh"
#include "kernels/sm90/sm90_kernels.h"
#include "kernels/sm90/tensor_map.h"

namespace flash_attn_ext::sm90 {

// DqTraitsType: of the dQ kernel, or of the score kernel.
template <class DqTraitsType>
struct TwoPassLaunch {
  using DqTraits = DqTraitsType;
  using Element = typename DqTraits::Element;
  using Traits = TwoPassGemmTraits<Element, DqTraits::kDims, DqTraits::kSkipsTiles>;

  TwoPassArguments args;
  const plan::BackwardPlan& plan;
  void* boxes;  // of a relative-position bias
  cudaStream_t stream;

  cudaError_t run() {
    cudaError_t error = make_tma_descriptors(args, MaterialisedTiles::kRows, MaterialisedTiles::kRows);
    if (DqTraits::kHasBoxes && error == cudaSuccess) error = make_bias_map(args.bias, args.params, boxes);
    if (error == cudaSuccess) error = prepare();
    const attention::BackwardParams& p = args.params;
    const int64_t num_pairs = p.batch * p.num_heads_k;
    const bool packed = p.sequences.cu_seqlens_q != nullptr;
    uint32_t* work_counters = args.workspace.work_counters;  // advances with each kernel launch
    for (int64_t first = 0; first < num_pairs && error == cudaSuccess; first += plan.materialised.pairs_per_launch) {
      const Pairs pairs = {first, std::min(plan.materialised.pairs_per_launch, num_pairs - first)};
      args.tiles.first_matrix = static_cast<int>(packed ? first / p.batch : first);
      error = differentiate_chunks(pairs, work_counters);
    }
    return error == cudaSuccess ? repair() : error;
  }

 private:
  // Computes the gradients of some pairs, in one launch, or in one for each key chunk of each query chunk.
  cudaError_t differentiate_chunks(const Pairs& pairs, uint32_t*& work_counters) {
    if (plan.materialised.chunks.empty()) return differentiate(pairs, work_counters);
    cudaError_t error = cudaSuccess;
    MaterialisedTiles chunk = args.tiles;
    int begin = 0;
    for (const auto& [end, key_chunk_tiles] : plan.materialised.chunks) {
      chunk.set_chunk(args.params, begin, end);
      for_each_key_chunk(args.params, chunk, key_chunk_tiles, [&](const MaterialisedTiles& launch) {
        args.tiles = launch;
        if (error == cudaSuccess) error = differentiate(pairs, work_counters);
      });
      begin = end;
    }
    args.tiles = chunk;
    return error;
  }

  cudaError_t differentiate(const Pairs& pairs, uint32_t*& work_counters) {
    cudaError_t error = store_scores(pairs, work_counters++);
    if (error == cudaSuccess) error = multiply(pairs, work_counters++);
    if constexpr (kDqFromTiles) {
      if (error == cudaSuccess) error = multiply_by_keys(pairs, work_counters++);
    }
    if (error == cudaSuccess && args.params.dbias.present()) error = add_to_dbias(pairs);
    return error;
  }

  static constexpr int kRows = MaterialisedTiles::kRows;
  static constexpr bool kDqFromTiles = DqTraits::kConfig.dq_from_tiles;

  Schedule schedule_of(const Pairs& pairs, Rows rows, int tile_rows, int slices) const {
    return make_schedule(args.params, {.pairs = pairs,
                                       .rows = rows,
                                       .tile_rows = tile_rows,
                                       .slices = slices,
                                       .element_bytes = sizeof(Element),
                                       .l2_bytes = plan.l2_bytes});
  }

  cudaError_t prepare() const {
    const attention::BackwardParams& p = args.params;
    const int64_t tiles = MaterialisedTiles::num_tiles(p.sequences.max_seqlen_q);
    const int64_t blocks = tiles * p.num_heads_q * p.batch;
    if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
    const TwoPassPrepareGrid grid = {attention::Divisor::of(static_cast<uint32_t>(tiles)),
                                     attention::Divisor::of(static_cast<uint32_t>(p.num_heads_q)), blocks,
                                     plan.workspace.dkdv_nan_flags.bytes};
    return common::launch_early(two_pass_prepare_kernel<Element>, {.blocks = blocks, .threads = kTwoPassPrepareThreads},
                                stream, args, grid);
  }

  template <class Kernel>
  cudaError_t launch(void (*kernel)(TwoPassArguments), uint32_t* work_counters) {
    static_assert(sizeof(typename Kernel::Shared) <= kSharedBytes);
    if (args.schedule.num_blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
    args.work_counters = work_counters;
    const int64_t blocks = std::min<int64_t>(args.schedule.num_blocks, plan.persistent_ctas);
    return common::launch_blocks_early<Kernel>(kernel, blocks, stream, args);
  }

  cudaError_t store_scores(const Pairs& pairs, uint32_t* work_counters) {
    if constexpr (kDqFromTiles) {
      args.schedule = schedule_of(pairs, Rows::kQueries, DqTraits::kQueries, count_spans());
      return launch<KernelShape<TwoPassScoreShared, DqTraits>>(two_pass_score_kernel<DqTraits>, work_counters);
    } else {
      args.schedule = schedule_of(pairs, Rows::kQueries, DqTraits::kQueries, 1);
      return launch<KernelShape<TwoPassDqShared, DqTraits>>(two_pass_dq_kernel<DqTraits>, work_counters);
    }
  }

  // The most spans of keys that the queries of a work tile of the score kernel see. The second row of queries may see
  // one materialised tile after those of the first.
  int count_spans() const {
    const int seen = std::min(args.tiles.width + MaterialisedTiles::kBlockRows - 1,
                              MaterialisedTiles::num_tiles(args.params.sequences.max_seqlen_k));
    return attention::ceil_div(seen, DqTraits::kSpanTiles);
  }

  cudaError_t multiply(const Pairs& pairs, uint32_t* work_counters) {
    const int results = Traits::kHasParts ? args.wanted.count_parts(args.params) : args.wanted.count();
    args.schedule = schedule_of(pairs, Rows::kKeys, Traits::kKeys, results);
    return launch<KernelShape<TwoPassGemmShared, Traits>>(two_pass_gemm_kernel<Traits>, work_counters);
  }

  // Computes dQ from materialised tiles of dS and K.
  cudaError_t multiply_by_keys(const Pairs& pairs, uint32_t* work_counters) {
    using GemmTraits = DqGemmTraits<Element, DqTraits::kDims>;
    args.schedule = schedule_of(pairs, Rows::kQueries, GemmTraits::kQueries, num_column_parts(args.params.head_dim_qk));
    return launch<KernelShape<DqGemmShared, GemmTraits>>(two_pass_dq_gemm_kernel<GemmTraits>, work_counters);
  }

  cudaError_t add_to_dbias(const Pairs& pairs) const {
    if constexpr (DqTraits::kHasBias) return dbias_from_tiles<Element>(args, pairs, stream);
    return cudaErrorInvalidValue;
  }

  // Recomputes rows whose flags are set.
  cudaError_t repair() const {
    const attention::BackwardParams& p = args.params;
    const common::FlaggedRows queries =
        common::rows_in_order_of_heads(p, args.workspace.dq_nan_flags, Rows::kQueries, kRows, kRows / 4);
    const common::FlaggedRows keys = common::rows_in_order_of_heads(
        p, args.workspace.dkdv_nan_flags, Rows::kKeys, Traits::kKeys, Traits::kKeys / Traits::kTile.flags());
    return common::repair_gradients<Element>(p, queries, keys, stream);
  }
};

template <class DqTraits>
cudaError_t launch_two_pass(const attention::BackwardParams& p, const plan::BackwardPlan& plan, void* workspace,
                            cudaStream_t stream) {
  const plan::BackwardPlan::Workspace& parts = plan.workspace;
  TwoPassArguments args = {};
  args.params = p;
  args.workspace = {.statistics = parts.statistics.in<float>(workspace),
                    .scores = parts.materialised_scores.in<void>(workspace),
                    .dq_nan_flags = parts.dq_nan_flags.in<uint8_t>(workspace),
                    .dkdv_nan_flags = parts.dkdv_nan_flags.in<uint8_t>(workspace),
                    .work_counters = parts.work_counter.in<uint32_t>(workspace),
                    .key_sums = parts.key_sums.in<float>(workspace),
                    .query_sums = parts.query_sums.in<float>(workspace),
                    .key_tiles_of_matrix = static_cast<int>(plan.materialised.key_tiles_of_matrix),
                    .tiles_of_head = static_cast<int>(plan.query_tiles_of_head),
                    .num_work_counters = static_cast<int>(parts.work_counter.bytes / sizeof(uint32_t))};
  args.tiles = MaterialisedTiles::of(p);
  args.tiles.between = plan.materialised.bytes_of_matrices / static_cast<int64_t>(sizeof(typename DqTraits::Element));
  args.wanted = {.dk = p.dk.data != nullptr, .dv = p.dv.data != nullptr};
  args.scale_log2e = static_cast<float>(p.score_mod.scale) * kLog2e;
  args.scales_lse = !(DqTraits::kHasBoxes || DqTraits::kGeneric);
  return TwoPassLaunch<DqTraits>{args, plan, parts.bias_boxes.in<void>(workspace), stream}.run();
}

template <class Element, bool kDqFromTiles>
cudaError_t backward_two_pass(const attention::BackwardParams& p, const plan::BackwardPlan& plan, void* workspace,
                              cudaStream_t stream) {
  return common::with_row<kTwoPassConfigs>(plan.row, [&](auto row) {
    constexpr TwoPassConfig kConfig = kTwoPassConfigs[row()];
    if constexpr (kConfig.dq_from_tiles != kDqFromTiles) {
      return cudaErrorInvalidValue;
    } else if constexpr (kDqFromTiles) {
      return launch_two_pass<TwoPassScoreTraits<Element, kConfig>>(p, plan, workspace, stream);
    } else {
      return plan.materialised.rows_with_key_chunks > 0
                 ? launch_two_pass<TwoPassDqTraits<Element, kConfig, true>>(p, plan, workspace, stream)
                 : launch_two_pass<TwoPassDqTraits<Element, kConfig, false>>(p, plan, workspace, stream);
    }
  });
}

}  // namespace flash_attn_ext::sm90
