// The warp that writes the key bias of each tile of keys to shared memory, while TMA loads the keys.
#pragma once

#include "kernels/common/rows/warp_rows.cuh"
#include "kernels/sm90/forward/traits.h"
#include "ptx/barrier.h"
#include "ptx/shared_memory.h"
#include "tile/accumulator.h"

namespace flash_attn_ext::sm90 {

// What is subtracted from the biases of a work tile. earlier: its tiles of keys but the last one, which is read
// directly, because its maximum in KeyBiasMaxima may include keys that the sequence does not have. largest: the largest
// bias of the lane's keys there. Called by a warp.
template <class Traits>
__device__ __forceinline__ float find_key_bias_maximum(const typename Traits::Arguments& args, const HeadCoord& coord,
                                                       int2 earlier, float largest) {
  static_assert(Traits::kConfig.block_n == attention::KeyBiasMaxima::kKeys);
  const float* const maxima =
      args.key_bias_maxima.row(static_cast<int>(coord.sequence.batch), static_cast<int>(coord.head));
#pragma unroll 2
  for (int tile = earlier.x + tile::lane(); tile < earlier.y; tile += tile::kWarpSize) {
    largest = fmaxf(largest, maxima[tile]);
  }
  return attention::subtracted_key_bias(args.params, coord.head, common::maximum_over_warp(largest));
}

// Writes the key bias of each work tile's tiles of keys. Keys that a sequence does not have get -inf. The bias of the
// next tile is loaded before the warp waits for the stage of this one, so that the load's latency is hidden.
template <class Traits>
struct ForwardKeyBiasWriter {
  using Element = typename Traits::Element;
  using Shared = ForwardShared<Traits>;
  using Work = typename Shared::Work;
  static constexpr int kKeys = Traits::kConfig.block_n;
  static constexpr int kLaneKeys = kKeys / tile::kWarpSize;
  static_assert(kLaneKeys * tile::kWarpSize == kKeys);

  const typename Traits::Arguments& args;
  Shared& shared;
  typename decltype(Shared::k_pipeline)::State k_state{};
  typename decltype(Shared::work_pipeline)::State work_state{};

  __device__ __forceinline__ void run() {
    if (tile::lane() < 8) shared.key_bias.factors.init(tile::lane());
#pragma unroll 1
    for (;; work_state.advance()) {
      shared.work_pipeline.consumer_wait(work_state);
      const Work& work = shared.work[work_state.stage];
      if (work.kind == WorkKind::kEnd) break;
      if (args.params.score_mod.bias.element == attention::ElementType::kFloat32) {
        write_tiles<float>(work);
      } else {
        write_tiles<Element>(work);
      }
      __syncwarp();  // no lane reads the work tile any more
      if (tile::lane() == 0) ptx::arrive(shared.work_pipeline.empty[work_state.stage]);
    }
  }

 private:
  template <class BiasElement>
  __device__ __forceinline__ void write_tiles(const Work& work) {
    const int begin = work.begin;
    int n = work.end - 1;
    if (n < begin) return;
    const attention::BroadcastView& view = args.params.score_mod.bias;
    const auto* const of_head = static_cast<const BiasElement*>(view.data) +
                                view.offset({work.coord.sequence.batch, work.coord.head, 0, tile::lane()});
    const int keys = static_cast<int>(work.coord.sequence.num_keys) - tile::lane();  // from the lane's first one on
    const auto read = [&](float(&biases)[kLaneKeys], int of_tile) {
#pragma unroll
      for (int i = 0; i < kLaneKeys; ++i) {
        const int key = of_tile * kKeys + i * tile::kWarpSize;
        biases[i] = key < keys ? static_cast<float>(of_head[key]) : -INFINITY;
      }
    };
    float of_tile[kLaneKeys];
    read(of_tile, n);
    float largest = of_tile[0];
#pragma unroll
    for (int i = 1; i < kLaneKeys; ++i) largest = fmaxf(largest, of_tile[i]);
    const float maximum = find_key_bias_maximum<Traits>(args, work.coord, {begin, n}, largest);
    if (tile::lane() == 0) shared.key_bias.maximum[work_state.stage] = maximum;
    const float inverse_scale = 1.0f / static_cast<float>(args.params.score_mod.scale);
#pragma unroll 1
    for (; n >= begin; --n) {
      float of_next[kLaneKeys];
      read(of_next, max(n - 1, begin));
      write(of_tile, maximum, inverse_scale);
#pragma unroll
      for (int i = 0; i < kLaneKeys; ++i) of_tile[i] = of_next[i];
    }
  }

  __device__ __forceinline__ void write(const float (&biases)[kLaneKeys], float maximum, float inverse_scale) {
    shared.k_pipeline.producer_acquire(k_state);
    auto& rows = shared.key_bias.columns[k_state.stage].rows;
#pragma unroll
    for (int i = 0; i < kLaneKeys; ++i) {
      rows[i * tile::kWarpSize + tile::lane()] =
          key_bias_column<typename Traits::KeyBias>(biases[i] - maximum, inverse_scale);
    }
    ptx::fence_stores();
    __syncwarp();
    if (tile::lane() == 0) ptx::arrive(shared.k_pipeline.full[k_state.stage]);
    k_state.advance();
  }
};

}  // namespace flash_attn_ext::sm90
