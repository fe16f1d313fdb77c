// Arguments, traits and shared memory of the single-tile kernel, and the work tiles of its persistent CTAs.
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention/params.h"
#include "kernels/config/sm90_forward.h"
#include "kernels/schedule/head_tiles.h"
#include "kernels/schedule/key_intervals.cuh"
#include "kernels/schedule/schedule.cuh"
#include "kernels/sm90/forward/key_bias.cuh"
#include "kernels/sm90/tensor_map.h"
#include "kernels/sm90/tile_scheduler.cuh"
#include "tile/sm90/augmented_columns.h"
#include "tile/sm90/gemm.h"
#include "tile/sm90/pipeline.h"

namespace flash_attn_ext::sm90 {

struct SingleTileArguments {
  TmaDescriptor q;
  TmaDescriptor k;
  TmaDescriptor v;
  OutputMap out;
  attention::ForwardParams params;
  Schedule schedule;  // of work tiles: up to `query_tiles` tiles of 64 queries of a head
  int query_tiles;
  uint8_t* nan_flags;  // one per warp of each tile of 64 queries
  KeyIntervals intervals;
  float scale_log2e;  // scale * log2(e)
};

struct WorkTile {
  int index;  // in the schedule
  int first_query;
  int query_tiles;  // 0: nothing to compute, or, to consumers, no more work tiles
  HeadCoord coord;
};

// Written to shared memory, or to registers where there are enough.
__device__ __forceinline__ void locate(WorkTile& work_tile, const SingleTileArguments& args, int index) {
  const Place at = args.schedule.place(static_cast<uint32_t>(index));
  const int rows = args.query_tiles * tile::kWarpgroupRows;
  work_tile.index = index;
  work_tile.first_query = static_cast<int>(at.tile) * rows;
  work_tile.coord = {args.params.sequences.at(at.batch), at.key_head * args.schedule.group + at.head_of_group,
                     at.key_head};
  const bool taken = args.intervals.narrow(work_tile.coord.sequence, work_tile.first_query, /*with_interval=*/true);
  const int left = taken ? static_cast<int>(work_tile.coord.sequence.num_queries) - work_tile.first_query : 0;
  work_tile.query_tiles = (min(max(left, 0), rows) + tile::kWarpgroupRows - 1) / tile::kWarpgroupRows;
}

template <class ElementType, SingleTileConfig kConfigValue>
struct SingleTileTraits {
  using Element = ElementType;
  static constexpr SingleTileConfig kConfig = kConfigValue;
  static constexpr HeadDims kDims = kConfig.dims;
  static constexpr int kKeys = kConfig.block_n;
  static constexpr ForwardRegisters kRegisters = single_tile_registers(kConfig);
  static_assert(has_registers(kConfig.warpgroups, kRegisters.consumer, kRegisters.producer));
  static constexpr int kWarps = 4 * kConfig.warpgroups;  // of the consumers
  static constexpr int kThreads = tile::kWarpgroupSize * (kConfig.warpgroups + 1);
  static constexpr int kPartKeys = kKeys / kConfig.parts;  // keys whose scores registers hold at a time
  static constexpr bool kAlibi = kConfig.score == ScoreMode::kAlibi;
  static constexpr bool kKeyBias = kConfig.has_key_bias();
  static constexpr int kKeyBiasWarps = kKeyBias ? 2 : 0;  // that write it

  using QTile = tile::SmemTile<Element, tile::kWarpgroupRows, kDims.qk>;
  using KTile = tile::SmemTile<Element, kKeys, kDims.qk>;
  using VTile = tile::SmemTile<Element, kKeys, kDims.v>;
  using KPart = tile::SmemTile<Element, kPartKeys, kDims.qk>;
  using VPart = tile::SmemTile<Element, kPartKeys, kDims.v>;
  using OutTile = tile::SmemTile<Element, tile::kWarpgroupRows, kDims.v>;
  using Scores = tile::WarpgroupAccumulator<kPartKeys>;
  using Output = tile::WarpgroupAccumulator<kDims.v>;
  using KeyBias = tile::AugmentedColumns<Element, kKeys>;  // divided by the scale
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
  struct KeyBiasStages {
    typename Traits::KeyBias columns[kStages];
    tile::SharedColumnFactors<typename Traits::Element> factors;
  };
  struct NoKeyBias {};
  // Other members follow, because compute-sanitizer ignores the stride of 0 in the factors' descriptor, and would
  // report a read past the end of shared memory.
  [[no_unique_address]] std::conditional_t<Traits::kKeyBias, KeyBiasStages, NoKeyBias> key_bias;
  typename Traits::OutTile out[kWarpgroups];  // staging for the TMA store
  WorkTile work_tile[kStages];
  WorkPipeline work_pipeline;    // full: published, without queries at the end; empty: released, with its K and V
  ptx::Barrier k_full[kStages];  // also counts the key bias
  ptx::Barrier v_full[kStages];
  QueryPipeline queries[kWarpgroups];
  bool any_flagged[Traits::kWarps];  // whether some of the warp's rows are flagged

  __device__ __forceinline__ void init() {
    // Released by each warp of the consumers, the producer thread, and the warps that write the key bias.
    work_pipeline.init(Traits::kWarps + 1 + Traits::kKeyBiasWarps);
    for (int i = 0; i < kStages; ++i) {
      ptx::init_barrier(k_full[i], 1 + Traits::kKeyBiasWarps);
      ptx::init_barrier(v_full[i], 1);
    }
    for (auto& pipeline : queries) pipeline.init(1);
    for (auto& flag : any_flagged) flag = false;
    ptx::fence_barrier_init();
  }
};

}  // namespace flash_attn_ext::sm90
