// Launches the forward kernel that a plan names.
#pragma once

#include <algorithm>
#include <bit>
#include <numeric>
#include <type_traits>

#include "attention/packed_heads.h"
#include "kernels/common/launch/launch_early.cuh"
#include "kernels/common/launch/with_row.h"
#include "kernels/common/sums/combine.h"
#include "kernels/config/combine.h"
#include "kernels/plan/plan.h"
#include "kernels/sm90/existing_tiles.h"
#include "kernels/sm90/forward/forward.cuh"
#include "kernels/sm90/sm90_kernels.h"
#include "kernels/sm90/tensor_map.h"
#include "kernels/sm90/tile_scheduler.cuh"

namespace flash_attn_ext::sm90 {

// The call with the rows of its tiles as its queries, and packed heads as one.
template <class Traits, class Params>
std::conditional_t<Traits::kConfig.may_pack_heads(), Params, const Params&> rows_of_tiles(const Params& p) {
  if constexpr (Traits::kConfig.may_pack_heads()) {
    return attention::with_packed_heads(p);
  } else {
    return p;
  }
}

inline KeyBoxes key_boxes_of(const attention::KvCache& cache, int tile_keys) {
  const int rows = cache.paged() ? std::gcd(static_cast<int>(cache.page_size.divisor), tile_keys) : tile_keys;
  return {.rows = rows, .count = tile_keys / rows};
}

template <class Traits>
KvSplits kv_splits_of(const attention::ForwardParams& p, const plan::ForwardPlan& plan, void* workspace) {
  const int64_t rows = rows_of_tiles<Traits>(p).sequences.max_seqlen_q;
  return {.count = static_cast<int>(plan.kv_splits),
          .column_slices = static_cast<int>(num_slices(p.head_dim_v, kColumns)),
          .tiles = static_cast<int>(attention::ceil_div(rows, Traits::kQueries)),
          .rows = {.out = plan.workspace.split_rows.template in<float>(workspace),
                   .state = plan.workspace.split_states.template in<float2>(workspace),
                   .rows = Traits::kQueries,
                   .columns = common::split_columns(Traits::kDims.v)}};
}

template <class Traits>
cudaError_t combine_splits(const typename Traits::Arguments& args, cudaStream_t stream) {
  const attention::BasicForwardParams& params = args.params;
  const auto divisor = [](int64_t n) { return attention::Divisor::of(static_cast<uint32_t>(n)); };
  const attention::BasicForwardParams& of_rows = rows_of_tiles<Traits>(params);
  const int64_t work_tiles_of_entry = of_rows.num_heads_q * args.kv_splits.column_slices;
  common::CombineParams p;
  static_cast<attention::BasicForwardParams&>(p) = params;
  p.tiles = {.rows = Traits::kQueries,
             .tiles = divisor(args.kv_splits.tiles),
             .group = divisor(params.num_heads_q / of_rows.num_heads_q),
             .slices = divisor(args.kv_splits.column_slices),
             .work_tiles_of_entry = divisor(work_tiles_of_entry)};
  p.splits = args.kv_splits.rows;
  p.splits_of_work_tile = args.kv_splits.count;
  p.num_work_tiles = static_cast<uint32_t>(params.batch * args.kv_splits.tiles * work_tiles_of_entry);
  p.rows_of_work_tile = divisor(std::min<int64_t>(Traits::kQueries, of_rows.sequences.max_seqlen_q));
  return common::combine<typename Traits::Element, common::split_columns(Traits::kDims.v)>(p, stream);
}

template <class Traits>
cudaError_t launch_forward(const ForwardCall& p, const plan::ForwardPlan& plan, void* workspace, cudaStream_t stream) {
  using Kernel = KernelShape<ForwardShared, Traits>;
  static_assert(sizeof(typename Kernel::Shared) <= shared_bytes(Traits::kConfig.ctas_per_sm));
  typename Traits::Arguments args;
  args.params = p;
  args.intervals = p.intervals;
  args.key_bias_maxima = p.key_bias_maxima;
  args.schedule =
      make_schedule(rows_of_tiles<Traits>(p), {.pairs = all_pairs(p),
                                               .order = forward_pair_order(p),
                                               .rows = Rows::kQueries,
                                               .tile_rows = Traits::kQueries,
                                               .slices = num_slices(p.head_dim_v, kColumns) * plan.kv_splits,
                                               .element_bytes = sizeof(typename Traits::Element),
                                               .l2_bytes = plan.l2_bytes,
                                               .smaller_head_groups = plan.smaller_head_groups,
                                               .uneven_heads = plan.uneven_heads});
  args.flags = {.previous = plan.workspace.tile_list.template in<int>(workspace),
                .flags = plan.workspace.nan_flags.template in<uint8_t>(workspace)};
  if constexpr (Traits::kConfig.split_kv) args.kv_splits = kv_splits_of<Traits>(p, plan, workspace);
  if (args.schedule.num_blocks == 0) return cudaSuccess;
  if (args.schedule.num_blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  args.key_boxes = key_boxes_of(p.cache, Traits::kConfig.block_n);
  const auto packed_heads = static_cast<int>(p.num_heads_q / rows_of_tiles<Traits>(p).num_heads_q);
  args.log2_packed_heads = std::countr_zero(static_cast<unsigned>(packed_heads));
  cudaError_t error = make_tma_descriptors(args, tile::kWarpgroupRows, args.key_boxes.rows, packed_heads);
  if constexpr (Traits::kConfig.tma_store) args.out = make_output_map(p, packed_heads);
  if (Traits::kHasBoxes && error == cudaSuccess) {
    error = make_bias_map(args.bias, p, plan.workspace.bias_boxes.template in<void>(workspace));
  }
  if (error == cudaSuccess) error = next_work_counter(args.work_counter, stream);
  if (error != cudaSuccess) return error;
  if (plan.existing_tiles > 0) {
    args.existing_tiles.entries = plan.existing_tiles;
    error = list_existing_query_tiles(args.existing_tiles, p.sequences, args.schedule, Traits::kQueries,
                                      plan.workspace.existing_tiles.template in<void>(workspace), stream);
    if (error != cudaSuccess) return error;
  }
  const int64_t blocks = std::min<int64_t>(args.existing_tiles.most(args.schedule.num_blocks), plan.persistent_ctas);
  error = common::launch_blocks_early<Kernel>(forward_kernel<Traits>, blocks, stream, args);
  if constexpr (Traits::kConfig.split_kv) {
    if (error == cudaSuccess) error = combine_splits<Traits>(args, stream);
  }
  return error;
}

template <class Element, ScoreMode kScore, RowKind kKind>
cudaError_t forward(const ForwardCall& call, const plan::ForwardPlan& plan, void* workspace, cudaStream_t stream) {
  return common::with_row<kForwardConfigs>(plan.row, [&](auto row) {
    constexpr ForwardConfig kConfig = kForwardConfigs[row()];
    if constexpr (kConfig.score == kScore && kConfig.kind() == kKind) {
      return launch_forward<ForwardTraits<Element, kConfig>>(call, plan, workspace, stream);
    }
    return cudaErrorInvalidValue;
  });
}

}  // namespace flash_attn_ext::sm90
