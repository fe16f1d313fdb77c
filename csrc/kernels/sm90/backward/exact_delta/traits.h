// Arguments, traits and shared memory of the kernels of the exact delta.
#pragma once

#include "attention/key_bias.h"
#include "attention/params.h"
#include "kernels/config/exact_delta.h"
#include "kernels/schedule/block.cuh"
#include "kernels/score/score_tile.cuh"
#include "kernels/sm90/kernel.cuh"
#include "kernels/sm90/tensor_map.h"
#include "tile/sm90/gemm.h"
#include "tile/sm90/pipeline.h"

namespace flash_attn_ext::sm90 {

struct ExactDeltaArguments {
  TmaDescriptor q;
  TmaDescriptor k;
  TmaDescriptor v;
  TmaDescriptor dout;
  attention::BackwardParams params;
  Schedule schedule;
  uint32_t* work_counter;  // 0 when the kernel starts
  float* partials;         // with slopes: of each batch entry, query head and work tile
  float scale_log2e;
  attention::KeyBiasMaxima key_bias_maxima;  // with a key bias
};

template <class ElementType, ExactDeltaConfig kConfigValue>
struct ExactDeltaTraits {
  using Element = ElementType;
  static constexpr ExactDeltaConfig kConfig = kConfigValue;
  static constexpr bool kKeyBias = kConfig.adds_key_bias;
  static constexpr int kQueries = kExactDeltaQueries;
  static constexpr int kKeys = kConfig.block_n;
  static constexpr int kWarpgroups = kQueries / tile::kWarpgroupRows;  // consumers; there is one more for the producer
  static constexpr int kComputingThreads = kWarpgroups * tile::kWarpgroupSize;
  static constexpr int kThreads = kComputingThreads + tile::kWarpgroupSize;
  static_assert(has_registers(kWarpgroups, kConfig.consumer_registers, kConfig.producer_registers));

  using QueryTile = tile::SmemTile<Element, kQueries, kConfig.head_dim>;  // Q and dO
  using KeyTile = tile::SmemTile<Element, kKeys, kConfig.head_dim>;       // K and V
  using Scores = tile::WarpgroupAccumulator<kKeys>;                       // rows are queries
  using Where = ScoreTile<Rows::kQueries, Scores>;
};

struct ExactDeltaWork {
  static constexpr int kEnd = -1;  // in place of the batch entry: there are no more work tiles

  int batch;
  int first_query;
  int index;  // of the partial sum
  int begin;  // key tiles of the work tile
  int end;
  TileRange own[kExactDeltaQueries / tile::kWarpgroupRows];  // those of a warpgroup's queries
  HeadCoord coord;
};

template <class Traits>
struct ExactDeltaShared {
  static constexpr int kComputingWarps = 4 * Traits::kWarpgroups;
  static constexpr int kWorkStages = 2;
  static constexpr int kStages = Traits::kConfig.stages;

  typename Traits::QueryTile q;
  typename Traits::QueryTile dout;
  typename Traits::KeyTile keys[kStages];  // K of a tile, then V of it
  ExactDeltaWork work[kWorkStages];
  float sums[kWorkStages][kComputingWarps];  // of a work tile, of each warp's queries
  tile::PipelineBarriers<1> query_pipeline;  // Q and dO
  tile::PipelineBarriers<kStages> key_pipeline;
  tile::PipelineBarriers<kWorkStages> work_pipeline;

  __device__ __forceinline__ void init() {
    query_pipeline.init(kComputingWarps);
    key_pipeline.init(kComputingWarps);
    work_pipeline.init(kComputingWarps);
    ptx::fence_barrier_init();
  }
};

}  // namespace flash_attn_ext::sm90
