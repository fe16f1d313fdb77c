// Launches the backward kernels that a plan names.
#pragma once

#include <algorithm>
#include <cmath>

#include "kernels/common/launch/launch_blocks.cuh"
#include "kernels/common/launch/launch_early.cuh"
#include "kernels/common/launch/with_row.h"
#include "kernels/common/masks/key_bias.h"
#include "kernels/common/repair/repair.h"
#include "kernels/common/sums/sums.h"
#include "kernels/plan/plan.h"
#include "kernels/sm90/backward/key_stationary/arguments.h"
#include "kernels/sm90/backward/key_stationary/dq_sums.cuh"
#include "kernels/sm90/backward/key_stationary/key_stationary.cuh"
#include "kernels/sm90/backward/key_stationary/statistics.cuh"
#include "kernels/sm90/existing_tiles.h"
#include "kernels/sm90/sm90_kernels.h"
#include "kernels/sm90/tensor_map.h"

namespace flash_attn_ext::sm90 {

// A CTA for each query tile.
inline int64_t num_blocks(const attention::AttentionParams& p) {
  return LoopOrder::num_tiles(p.sequences.max_seqlen_q, LoopOrder::kQueries) * p.num_heads_q * p.batch;
}

// The kernels before the main one: the table of key tiles, then statistics.
template <class Element, class Arguments>
cudaError_t prepare_key_stationary(const Arguments& args, const QueryTileGrid& grid, int64_t sms, cudaStream_t stream) {
  constexpr int64_t kCtasOfSm = 8;
  const cudaError_t error = list_key_tiles(args, stream);
  if (error != cudaSuccess) return error;
  const bool has_few_columns = args.params.head_dim_v <= 64;
  auto kernel = has_few_columns ? statistics_kernel<Element, 8> : statistics_kernel<Element, 16>;
  int64_t ctas = grid.blocks;
  if (args.existing_tiles.present()) {
    kernel = has_few_columns ? searching_statistics_kernel<Element, 8> : searching_statistics_kernel<Element, 16>;
    ctas = std::min(ctas, kCtasOfSm * sms);
  }
  return common::launch_early(kernel, {.blocks = ctas, .threads = kStatisticsThreads}, stream,
                              static_cast<const KeyStationaryArguments&>(args), grid);
}

template <class Traits>
cudaError_t launch_main(const typename Traits::Arguments& args, int64_t persistent_ctas, cudaStream_t stream) {
  using Kernel = KernelShape<KeyStationaryShared, Traits>;
  static_assert(sizeof(typename Kernel::Shared) <= kSharedBytes);
  const cudaError_t error = common::allow_shared_memory<Kernel>(key_stationary_kernel<Traits>);
  if (error != cudaSuccess) return error;
  const common::EarlyLaunch launch = {.blocks = std::min<int64_t>(Traits::num_work_tiles(args), persistent_ctas),
                                      .threads = Kernel::kThreads,
                                      .shared_bytes = sizeof(typename Kernel::Shared),
                                      .together = args.order.cyclic};  // CTAs of a phase wait for each other
  return common::launch_early(key_stationary_kernel<Traits>, launch, stream, args);
}

// The launches of query chunks, and the kernels before each. prepare: launches those before the first one.
template <class Traits, class Prepare>
cudaError_t launch_chunks(const KeyStationaryArguments& args, const plan::BackwardPlan& plan, cudaStream_t stream,
                          Prepare&& prepare) {
  ChunkedKeyStationaryArguments launch = {args};
  launch.chunks = plan.query_chunks;
  launch.is_first = true;
  cudaError_t error = cudaSuccess;
  for (launch.first_pair = 0; launch.first_pair < args.order.pairs; launch.first_pair += plan.pairs_per_launch) {
    launch.order.pairs = std::min(plan.pairs_per_launch, args.order.pairs - launch.first_pair);
    for (launch.launch = 0; launch.launch < launch.chunks.count; ++launch.launch) {
      launch.key_tiles = launch.chunks.key_tiles(args.order, args.params, launch.launch);
      if (launch.num_work_tiles() == 0) continue;
      error = launch.is_first ? prepare(launch) : list_key_tiles(launch, stream);
      if (error == cudaSuccess) error = launch_main<Traits>(launch, plan.persistent_ctas, stream);
      if (error != cudaSuccess) return error;
      launch.is_first = false;
    }
  }
  return error;
}

// The main kernel, and the kernels before it.
template <class Element>
cudaError_t launch_planned(const KeyStationaryArguments& args, const plan::BackwardPlan& plan,
                           const QueryTileGrid& grid, cudaStream_t stream) {
  const auto prepare = [&](const auto& launch) {
    return prepare_key_stationary<Element>(launch, grid, plan.persistent_ctas, stream);
  };
  return common::with_row<kKeyStationaryConfigs>(plan.row, [&](auto row) {
    using Traits = KeyStationaryTraits<Element, kKeyStationaryConfigs[row()]>;
    if constexpr (Traits::kChunked) {
      return launch_chunks<Traits>(args, plan, stream, prepare);
    } else {
      const cudaError_t error = prepare(args);
      return error == cudaSuccess ? launch_main<Traits>(args, plan.persistent_ctas, stream) : error;
    }
  });
}

template <class Element>
cudaError_t repair_key_stationary(const KeyStationaryArguments& args, cudaStream_t stream) {
  const attention::BackwardParams& p = args.params;
  const common::FlaggedRows queries =
      common::rows_in_order_of_heads(p, args.workspace.dq_nan_flags, Rows::kQueries, LoopOrder::kQueries, 16);
  const common::FlaggedRows keys =
      common::rows_in_order_of_heads(p, args.workspace.dkdv_nan_flags, Rows::kKeys, LoopOrder::kKeys, 16);
  return common::repair_gradients<Element>(p, queries, keys, stream);
}

template <class Element>
cudaError_t backward_key_stationary(const attention::BackwardParams& p, const plan::BackwardPlan& plan, void* workspace,
                                    cudaStream_t stream) {
  KeyStationaryArguments args;
  const plan::BackwardPlan::Workspace& parts = plan.workspace;
  args.params = p;
  args.order = plan.order;
  args.scale = static_cast<float>(p.score_mod.scale);
  args.scale_log2e = args.scale * kLog2e;
  const KeyStationaryConfig& config = kKeyStationaryConfigs[plan.row];
  const int shift = weight_shift(config);
  args.shift = static_cast<float>(shift);
  args.adds_statistics = config.adds_statistics;
  args.lse_factor = -kLog2e / args.scale_log2e;
  args.gradient_scale = keeps_shift<Element>(config.adds_statistics) ? std::ldexp(args.scale, -shift) : args.scale;
  args.kept_factor = static_cast<float>(std::ldexp(p.dropout.rescale, -shift));
  if (caps_scores(config.score)) {
    args.cap_log2e = static_cast<float>(p.score_mod.softcap) * kLog2e;
    args.cap_factor = static_cast<float>(p.score_mod.scale / p.score_mod.softcap) * (2.0f * kLog2e);
  }
  args.workspace = {.table = parts.key_tiles.in<void>(workspace),
                    .dq_sums = parts.dq_sums.in<float>(workspace),
                    .statistics = parts.statistics.in<float>(workspace),
                    .later_statistics = parts.later_statistics.in<float>(workspace),
                    .dq_semaphores = parts.dq_semaphores.in<int>(workspace),
                    .dq_nan_flags = parts.dq_nan_flags.in<uint8_t>(workspace),
                    .dkdv_nan_flags = parts.dkdv_nan_flags.in<uint8_t>(workspace),
                    .work_counter = parts.work_counter.in<uint32_t>(workspace),
                    .key_sums = parts.key_sums.in<float>(workspace),
                    .arrivals = parts.arrivals.in<int>(workspace),
                    .tiles_of_head = static_cast<int>(plan.query_tiles_of_head),
                    .accumulators_of_head = static_cast<int>(plan.query_tiles_of_head << plan.order.log2_accumulators)};
  args.key_bias_maxima =
      attention::KeyBiasMaxima::in(parts.bias_maxima.in<float>(workspace), attention::Float32KeyBias::of(p));
  args.has_exact_delta = plan.delta == plan::DeltaSource::kExactKernel;
  args.dscore_sums = parts.dscore_sums.in<float>(workspace);
  auto* const keys_before_padding = parts.keys_before_padding.in<int32_t>(workspace);
  args.keys_before_padding = keys_before_padding;
  if (num_blocks(p) > INT32_MAX) return cudaErrorInvalidConfiguration;
  const int query_tiles = LoopOrder::num_tiles(p.sequences.max_seqlen_q, LoopOrder::kQueries);
  const QueryTileGrid grid = {attention::Divisor::of(static_cast<uint32_t>(query_tiles)),
                              attention::Divisor::of(static_cast<uint32_t>(p.num_heads_q)),
                              static_cast<uint32_t>(num_blocks(p))};
  if (parts.mask_bits.present()) {
    args.mask = MaskIterations::in(parts.mask_bits.in<void>(workspace), p, plan.order);
    args.mask.part_sums = plan.part_sums;
    args.mask.ctas = static_cast<int>(plan.persistent_ctas);
  }
  cudaError_t error = make_tma_descriptors(args, LoopOrder::kQueries, LoopOrder::kKeys);
  if (error == cudaSuccess && reads_bias_boxes(config.score))
    error = make_bias_map(args.bias, p, parts.bias_boxes.in<void>(workspace));
  if (error == cudaSuccess && keys_before_padding != nullptr)
    error = common::count_keys_before_padding(p, keys_before_padding, stream);
  if (error == cudaSuccess) error = list_mask_iterations(args, stream);
  if (error == cudaSuccess) error = divide_key_tiles(args, plan.persistent_ctas, stream);
  if (error == cudaSuccess && parts.existing_tiles.present()) {
    args.existing_tiles.entries = plan.existing_tiles;
    error = list_existing_key_tiles(args.existing_tiles, p.sequences, plan.order, p.num_heads_k,
                                    parts.existing_tiles.in<void>(workspace), stream);
  }
  if (error == cudaSuccess) error = launch_planned<Element>(args, plan, grid, stream);
  if (error == cudaSuccess && args.order.log2_accumulators > 0) {
    error = common::launch_early(
        sum_dq_kernel<Element>,
        {.blocks = num_blocks(p), .threads = DqSlice::kThreads, .slices = plan.dq_head_dim / DqSlice::kColumns}, stream,
        args, grid);
  }
  if (error == cudaSuccess) error = repair_key_stationary<Element>(args, stream);
  if (error != cudaSuccess || args.dscore_sums == nullptr || !p.dbias.present()) return error;
  return common::launch_dbias_from_keys(p,
                                        {.data = args.dscore_sums,
                                         .rows = p.num_heads_k * args.order.kv_group_shares,
                                         .keys_of_row = int64_t{args.order.tiles} * LoopOrder::kKeys},
                                        stream);
}

}  // namespace flash_attn_ext::sm90
