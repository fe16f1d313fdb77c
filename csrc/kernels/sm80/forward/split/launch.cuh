// Launches the split-KV kernel and the combine kernel.
#pragma once

#include "attention/division.h"
#include "kernels/common/launch/launch_early.cuh"
#include "kernels/common/sums/combine.h"
#include "kernels/plan/sm80/split.h"
#include "kernels/sm80/forward/split/split_kernel.cuh"
#include "kernels/sm80/launch.cuh"
#include "kernels/sm80/sm80_kernels.h"

namespace flash_attn_ext::sm80 {

template <class Kernel>
SplitParams split_params(const attention::AppendingForwardParams& params, const ForwardPlan& plan, void* workspace) {
  constexpr SplitTile kTile = Kernel::kTile;
  const auto group = static_cast<uint32_t>(params.queries_per_key_head());
  const int64_t rows = params.sequences.max_seqlen_q * group;
  SplitParams p;
  static_cast<attention::AppendingForwardParams&>(p) = params;
  if (plan.append_ctas == 0) p.append = {};  // none, or append_kv has written them
  // A single query's diagonal key is the last one, so causality masks nothing.
  if (params.sequences.max_seqlen_q == 1 && !params.visibility.top_left && params.visibility.right >= 0) {
    p.visibility.right = attention::Visibility::kUnbounded;
  }
  const auto slices = static_cast<uint32_t>(num_slices(params.head_dim_v, kTile.columns));
  const RowTiles tiles = {.rows = static_cast<uint32_t>(kTile.rows),
                          .tiles = Divisor::of(static_cast<uint32_t>(attention::ceil_div(rows, kTile.rows))),
                          .group = Divisor::of(group),
                          .slices = Divisor::of(slices),
                          .work_tiles_of_entry = Divisor::of(static_cast<uint32_t>(params.num_heads_k) * slices)};
  p.stream_k = {.tiles = tiles,
                .entries = static_cast<uint32_t>(params.batch) * tiles.tiles.divisor,
                .blocks = static_cast<uint32_t>(std::min<int64_t>(plan.persistent_ctas, WorkListShares::kMostBlocks)),
                .least_tiles = static_cast<uint32_t>(plan::kLeastKeysOfCta / kTile.keys),
                .uniform = params.sequences.cu_seqlens_q == nullptr && !params.cache.present(),
                .known = {}};
  if (p.stream_k.uniform && tiles.tiles.divisor == 1) {
    const EntryKeys keys = keys_of_entry<kTile.keys>(p, tiles, 0);
    const uint32_t num_tiles = keys.count() * p.stream_k.entries * tiles.work_tiles_of_entry.divisor;
    if (num_tiles != 0) {
      p.stream_k.known = {.key_tiles_of_work_tile = Divisor::of(keys.count()),
                          .shares = WorkListShares::of(num_tiles, p.stream_k.blocks, p.stream_k.least_tiles),
                          .seen = keys.tiles,
                          .num_rows = keys.num_rows};
    }
  }
  p.splits = {.out = plan.workspace.split_rows.in<float>(workspace),
              .state = plan.workspace.split_states.in<float2>(workspace),
              .rows = kTile.rows,
              .columns = kTile.columns};
  p.work_tiles = plan.workspace.split_list.in<TileSplits>(workspace);
  return p;
}

inline common::CombineParams combine_params(const SplitParams& split, const ForwardPlan& plan) {
  common::CombineParams p;
  static_cast<attention::ForwardParams&>(p) = split;
  p.tiles = split.stream_k.tiles;
  p.splits = split.splits;
  p.work_tiles = split.work_tiles;
  p.slot_step = kSlotsPerBlock;
  p.known = split.stream_k.known;
  p.num_work_tiles = split.stream_k.entries * p.tiles.work_tiles_of_entry.divisor;
  const int64_t rows = std::min<int64_t>(p.tiles.rows, p.sequences.max_seqlen_q * p.tiles.group.divisor);
  p.rows_of_work_tile = Divisor::of(static_cast<uint32_t>(rows));
  p.warps_per_row = plan.combine_warps;
  p.warms_up = plan.combine_warms_up;
  return p;
}

template <class Kernel>
cudaError_t launch_split(const attention::AppendingForwardParams& params, const ForwardPlan& plan, void* workspace,
                         cudaStream_t stream) {
  const SplitParams p = split_params<Kernel>(params, plan, workspace);
  const cudaError_t error =
      common::launch_blocks_early<Kernel>(split_kernel<Kernel>, p.stream_k.blocks + plan.append_ctas, stream, p);
  if (error != cudaSuccess) return error;
  return common::combine<typename Kernel::Element, Kernel::kColumns>(combine_params(p, plan), stream);
}

template <class Element, int kHeadDim>
cudaError_t forward_split(const attention::AppendingForwardParams& params, const ForwardPlan& plan, void* workspace,
                          cudaStream_t stream) {
  return with_row_of<kSplitConfigs, Element, kHeadDim>(plan.row, [&](auto row) {
    constexpr SplitConfig kConfig = kSplitConfigs[row()];
    if constexpr (kConfig.appends_keys) {
      if (plan.append_ctas > 0) {
        return launch_split<SplitKernel<Element, kConfig, true>>(params, plan, workspace, stream);
      }
    }
    return launch_split<SplitKernel<Element, kConfig, false>>(params, plan, workspace, stream);
  });
}

}  // namespace flash_attn_ext::sm80
