// What a single-tile kernel is compiled for, and the layout of its shared memory.
#pragma once

#include "kernels/config/sm90_forward.h"
#include "kernels/sm90/forward/single_tile/arguments.h"
#include "tile/sm90/pipeline.h"

namespace flash_attn_ext::sm90 {

template <class ElementType, SingleTileConfig kConfigValue>
struct SingleTileTraits {
  using Element = ElementType;
  static constexpr HeadDims kDims = kSingleTileHeadDims;
  static constexpr SingleTileConfig kConfig = kConfigValue;
  static constexpr int kKeys = kConfig.block_n;
  static constexpr ForwardRegisters kRegisters = single_tile_registers(kConfig);
  static_assert(has_registers(kConfig.warpgroups, kRegisters.consumer, kRegisters.producer));
  static constexpr int kWarps = 4 * kConfig.warpgroups;  // of the consumers
  static constexpr int kThreads = tile::kWarpgroupSize * (kConfig.warpgroups + 1);
  static constexpr int kPartKeys = kKeys / kConfig.parts;  // keys whose scores registers hold at a time

  using QTile = tile::SmemTile<Element, tile::kWarpgroupRows, kDims.qk>;
  using KTile = tile::SmemTile<Element, kKeys, kDims.qk>;
  using VTile = tile::SmemTile<Element, kKeys, kDims.v>;
  using KPart = tile::SmemTile<Element, kPartKeys, kDims.qk>;
  using VPart = tile::SmemTile<Element, kPartKeys, kDims.v>;
  using OutTile = tile::SmemTile<Element, tile::kWarpgroupRows, kDims.v>;
  using Scores = tile::WarpgroupAccumulator<kPartKeys>;
  using Output = tile::WarpgroupAccumulator<kDims.v>;
};

// A work tile takes one stage of K and V; each warpgroup has a pipeline of queries of its own.
template <class Traits>
struct SingleTileShared {
  static constexpr int kStages = Traits::kConfig.kv_stages;
  static constexpr int kQueryStages = Traits::kConfig.q_stages;
  static constexpr int kWarpgroups = Traits::kConfig.warpgroups;
  using WorkPipeline = tile::PipelineBarriers<kStages>;
  using QueryPipeline = tile::PipelineBarriers<kQueryStages>;

  typename Traits::KTile k[kStages];
  typename Traits::VTile v[kStages];
  typename Traits::QTile q[kWarpgroups][kQueryStages];
  typename Traits::OutTile out[kWarpgroups];  // staging for the TMA store
  WorkTile work_tile[kStages];
  WorkPipeline work_pipeline;  // full: published, without queries at the end; empty: released, with its K and V
  ptx::Barrier k_full[kStages];
  ptx::Barrier v_full[kStages];
  QueryPipeline queries[kWarpgroups];
  bool any_flagged[Traits::kWarps];  // whether some of the warp's rows are flagged

  __device__ __forceinline__ void init() {
    work_pipeline.init(Traits::kWarps + 1);  // and the producer thread
    for (int i = 0; i < kStages; ++i) {
      ptx::init_barrier(k_full[i], 1);
      ptx::init_barrier(v_full[i], 1);
    }
    for (auto& pipeline : queries) pipeline.init(1);
    for (auto& flag : any_flagged) flag = false;
    ptx::fence_barrier_init();
  }
};

}  // namespace flash_attn_ext::sm90
