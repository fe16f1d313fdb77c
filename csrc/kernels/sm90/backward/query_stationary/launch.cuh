// Launches the query-stationary backward kernels.
#pragma once

#include "kernels/common/launch/launch_early.cuh"
#include "kernels/common/launch/with_row.h"
#include "kernels/common/repair/repair.h"
#include "kernels/common/sums/sums.h"
#include "kernels/plan/plan.h"
#include "kernels/sm90/backward/query_stationary/query_stationary.cuh"
#include "kernels/sm90/backward/query_stationary/sum_dq_partials.cuh"
#include "kernels/sm90/sm90_kernels.h"
#include "kernels/sm90/tensor_map.h"

namespace flash_attn_ext::sm90 {

template <class Element, QueryStationaryConfig kConfig>
cudaError_t launch_query_stationary(const QueryStationaryArguments& args, cudaStream_t stream) {
  using Traits = QueryStationaryTraits<Element, kConfig>;
  using Kernel = KernelShape<QueryStationaryShared, Traits>;
  static_assert(sizeof(typename Kernel::Shared) <= kSharedBytes);
  const cudaError_t error =
      common::launch_blocks_early<Kernel>(query_stationary_kernel<Traits>, args.work_list.blocks, stream, args);
  if (error != cudaSuccess) return error;
  return common::launch_early(query_stationary_sum_kernel<Element>,
                              {.blocks = 2 * all_pairs(args.params).count,
                               .threads = DqSlice::kThreads,
                               .slices = kConfig.dims.qk / DqSlice::kColumns / args.slices_of_sum},
                              stream, args);
}

template <class Element>
cudaError_t repair_query_stationary(const QueryStationaryArguments& args, cudaStream_t stream) {
  const attention::BackwardParams& p = args.params;
  const common::FlaggedRows queries =
      common::rows_in_order_of_heads(p, args.dq_nan_flags, Rows::kQueries, kStationaryQueries, 16);
  const common::FlaggedRows keys =
      common::rows_in_order_of_heads(p, args.dkdv_nan_flags, Rows::kKeys, kStationaryQueriesKeys, 16);
  return common::repair_gradients<Element>(p, queries, keys, stream);
}

template <class Element>
cudaError_t backward_query_stationary(const attention::BackwardParams& p, const plan::BackwardPlan& plan,
                                      void* workspace, cudaStream_t stream) {
  const plan::BackwardPlan::Workspace& parts = plan.workspace;
  QueryStationaryArguments args;
  args.params = p;
  args.tiles = static_cast<int>((p.sequences.max_seqlen_k + kStationaryQueriesKeys - 1) / kStationaryQueriesKeys);
  args.work_list = WorkListShares::of(static_cast<uint32_t>(all_pairs(p).count) * args.tiles,
                                      static_cast<uint32_t>(plan.persistent_ctas), 1);
  args.dq_partials = parts.dq_partials.in<float>(workspace);
  args.dq_nan_flags = parts.dq_nan_flags.in<uint8_t>(workspace);
  args.dkdv_nan_flags = parts.dkdv_nan_flags.in<uint8_t>(workspace);
  args.slices_of_sum = slices_of_sum(args.work_list.blocks / all_pairs(p).count);
  args.scale = static_cast<float>(p.score_mod.scale);
  args.scale_log2e = args.scale * kLog2e;
  cudaError_t error = make_tma_descriptors(args, kStationaryQueries, kStationaryQueriesKeys);
  const auto make_gradient_map = [&](TmaDescriptor& map, const attention::MatrixView& view, int64_t columns) {
    if (error != cudaSuccess || view.data == nullptr) return;
    const OperandShape shape = {p.batch, p.num_heads_k, p.sequences.max_seqlen_k, columns, OutputMap::kRows};
    error = make_tma_descriptor(map, view, shape, p.element);
  };
  make_gradient_map(args.dk, p.dk, p.head_dim_qk);
  make_gradient_map(args.dv, p.dv, p.head_dim_v);
  if (error == cudaSuccess) error = common::launch_delta(attention::delta_params(args.params), stream);
  if (error != cudaSuccess) return error;
  error = common::with_row<kQueryStationaryConfigs>(plan.row, [&](auto row) {
    return launch_query_stationary<Element, kQueryStationaryConfigs[row()]>(args, stream);
  });
  return error == cudaSuccess ? repair_query_stationary<Element>(args, stream) : error;
}

}  // namespace flash_attn_ext::sm90
