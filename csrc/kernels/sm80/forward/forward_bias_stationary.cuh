// Forward pass of many short sequences, such as the windows of Swin.
//
// Grid: persistent CTAs. Each has one head and a share of the batch entries (BatchEntries). Its tile holds all queries
// and keys of a sequence, so there is one iteration for each sequence, and no loop over keys. A bias that all batch
// entries share is read once, and stays in shared memory. Each warp owns 16 queries. Shared memory: the bias, and two
// stages of Q, K, V and mask bits, or one above head dim 64. With two, the loads of the next sequence overlap the
// current one, and one barrier for each sequence says both that its loads have arrived and that no warp reads the other
// stage any more. Where each batch entry has a bias of its own, it is loaded ahead, too. Threads then read it to
// registers first, and a second barrier says that its place is free for the next one.
#pragma once

#include "kernels/common/launch/launch_early.cuh"
#include "kernels/common/rows/attention_rows.cuh"
#include "kernels/sm80/forward/forward_rows.cuh"
#include "kernels/sm80/launch.cuh"
#include "kernels/sm80/nan_flags.cuh"
#include "kernels/sm80/sm80_kernels.h"
#include "kernels/sm80/stationary_bias.cuh"
#include "ptx/dependent_launch.h"
#include "tile/sm80/copy_rows.h"
#include "tile/sm80/gemm.h"

namespace flash_attn_ext::sm80 {

// Recomputes the warp's flagged rows without tensor cores: a NaN may be a weight of 0 times a NaN or infinity of a key
// that the row does not attend to. This is a call, and comes at the end, so that the loop over batch entries holds no
// register for it.
template <class Kernel>
__device__ __noinline__ void repair_flagged(const ForwardParams& p, BatchEntries entries) {
  for_each_flagged_row<Kernel>(p, p.nan_flags, entries, [&](const HeadCoord& coord, int row) {
    if (row >= coord.sequence.num_queries) return;
    const common::HeadRows head = common::head_rows(p, coord.sequence, coord.head);
    common::compute_forward_row<typename Kernel::Element>(p, head, row, {});
  });
}

// kOwnBias: each batch entry has a bias of its own, which CopiedBias copies.
template <class ElementType, BiasStationaryConfig kConfig, bool kOwnBias>
struct ForwardBiasStationaryKernel {
  using Element = ElementType;
  using WarpRows = ForwardRows<KernelTraits<Element, kConfig>>;
  static constexpr TileShape kTile = kConfig.tile;
  static constexpr bool kLoadsAhead = kTile.stages > 1;  // the next sequence, while it computes this one
  static_assert(kLoadsAhead || !kOwnBias);
  static constexpr int kThreads = kTile.warps * kWarpSize;
  static constexpr int kRowsPerWarp = WarpRows::kRowsPerWarp;

  using Tile = tile::SharedTile<Element, kBiasStationaryTokens, kConfig.head_dim>;
  using Scores = tile::Accumulator<kRowsPerWarp / 16, kTile.keys / 8>;
  using Bias = StationaryBias<Element, Scores, kThreads>;
  using OwnBias = CopiedBias<Element, kThreads>;  // of a sequence
  using Where = ScoreTile<Rows::kQueries, Scores>;

  struct Stage {
    Tile q;
    Tile k;
    Tile v;
    StagedMaskBits mask;
  };
  struct Shared {
    Stage stages[kTile.stages];
    union {
      Bias bias;
      OwnBias own_bias;
    };
  };

  const ForwardParams& p;
  Shared& shared;

  __device__ __forceinline__ void run() {
    const BatchEntries entries = batch_entries(p);
    const auto end = static_cast<int>(p.batch);
    load(shared.stages[0], coord_at(p, entries.head, entries.first));
    const bool stays = !kOwnBias && p.score_mod.bias.batch_stride == 0;  // the bias of the head
    if (stays) load_bias(coord_at(p, entries.head, entries.first));
    const uint32_t hidden = kOwnBias ? OwnBias::hidden_by_position(where(coord_at(p, entries.head, entries.first))) : 0;
    int current = 0;  // the stage of the sequence
    bool any_flagged = false;
#pragma unroll 1
    for (int entry = entries.first;; entry += entries.step) {
      ptx::wait_copies<0>();
      __syncthreads();  // the sequence has arrived, and no warp reads the other stage any more
      const int next = entry + entries.step;
      const auto load_next = [&] {
        if (kLoadsAhead && next < end) load(shared.stages[1 - current], coord_at(p, entries.head, next));
      };
      if constexpr (kOwnBias) {
        const auto own_bias = shared.own_bias.read(where(coord_at(p, entries.head, entry)), hidden);
        __syncthreads();  // no warp reads the bias any more
        load_next();
        any_flagged |= compute(shared.stages[current], coord_at(p, entries.head, entry), own_bias);
      } else {
        load_next();
        if (!stays) load_bias(coord_at(p, entries.head, entry));
        any_flagged |= compute(shared.stages[current], coord_at(p, entries.head, entry), shared.bias);
      }
      if (next >= end) break;
      if constexpr (kLoadsAhead) {
        current = 1 - current;
      } else {
        __syncthreads();  // no warp reads the sequence any more
        load(shared.stages[0], coord_at(p, entries.head, next));
      }
    }
    if (any_flagged) repair_flagged<ForwardBiasStationaryKernel>(p, entries);
  }

 private:
  __device__ __forceinline__ static int warp_row() { return tile::warp() * kRowsPerWarp; }

  __device__ __forceinline__ Where where(const HeadCoord& coord) const { return {p, coord, warp_row(), 0}; }
  __device__ __forceinline__ void load_bias(const HeadCoord& coord) { shared.bias.load(where(coord)); }

  __device__ __forceinline__ void load(Stage& stage, const HeadCoord& coord) const {
    const int64_t batch = coord.sequence.batch;
    const auto queries = static_cast<int>(coord.sequence.num_queries);
    const auto keys = static_cast<int>(coord.sequence.num_keys);
    const auto qk = static_cast<int>(p.head_dim_qk);
    const auto dv = static_cast<int>(p.head_dim_v);
    tile::copy_sequence_async<kThreads>(stage.q, {p.q.row<const Element>(batch, coord.head, 0), p.q.row_stride, qk},
                                        queries);
    tile::copy_sequence_async<kThreads>(stage.k, {p.k.row<const Element>(batch, coord.key_head, 0), p.k.row_stride, qk},
                                        keys);
    tile::copy_sequence_async<kThreads>(stage.v, {p.v.row<const Element>(batch, coord.key_head, 0), p.v.row_stride, dv},
                                        keys);
    stage.mask.load(p, coord);
    if constexpr (kOwnBias) shared.own_bias.copy(p.score_mod.bias, coord);
    ptx::commit_copies();
  }

  // Returns whether the warp's rows are flagged.
  template <class Pairs>
  __device__ __forceinline__ bool compute(Stage& stage, const HeadCoord& coord, const Pairs& bias) const {
    Scores scores;
    scores.clear();
    tile::multiply_head_dims(scores, stage.q, warp_row(), stage.k);
    WarpRows rows = {p};
    add_bias(scores, bias, rows.folds_scale() ? 1.0f : static_cast<float>(p.score_mod.scale));
    if (p.score_mod.mask_bits.present()) hide_masked(scores, stage.mask);
    rows.clear();
    rows.softmax(scores);
    tile::multiply_registers(rows.out, scores, stage.v);
    rows.finish(coord, 0, 0, stage.q);  // only this warp has read its rows of Q
    return flag_nan_in_order_of_heads<kTile.warps>(p.nan_flags, p, coord, rows.out.has_nan());
  }

  // Selects -inf instead of adding it, since a NaN in a key that is hidden must not reach the row.
  template <class Pairs>
  __device__ __forceinline__ static void add_bias(Scores& scores, const Pairs& bias, float factor) {
    bias.for_each_pair([&](int r, int j, float low, float high) {
      scores.at(r, j, 0) = low == -INFINITY ? low : fmaf(scores.at(r, j, 0), factor, low);
      scores.at(r, j, 1) = high == -INFINITY ? high : fmaf(scores.at(r, j, 1), factor, high);
    });
  }

  __device__ __forceinline__ static void hide_masked(Scores& scores, const StagedMaskBits& mask) {
#pragma unroll
    for (int r = 0; r < Scores::kThreadRows; ++r) {
      const uint32_t word = mask.word(warp_row() + Scores::row(r), tile::lane() % 4);
#pragma unroll
      for (int j = 0; j < Scores::kColumnTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if ((word >> (2 * j + e) & 1) == 0) scores.at(r, j, e) = -INFINITY;
        }
      }
    }
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kTile.ctas_per_sm)
    forward_bias_stationary_kernel(const __grid_constant__ ForwardParams p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  ptx::wait_for_kernel_before();
  ptx::allow_dependent_launch();
  Kernel{p, *reinterpret_cast<typename Kernel::Shared*>(shared_memory)}.run();
}

template <class Kernel>
cudaError_t launch_forward_bias_stationary(const ForwardParams& p, const ForwardPlan& plan, cudaStream_t stream) {
  static_assert(sizeof(typename Kernel::Shared) <= kSharedBytes);
  return common::launch_blocks_early<Kernel>(forward_bias_stationary_kernel<Kernel>, plan.persistent_ctas, stream, p);
}

template <class Element>
cudaError_t forward_bias_stationary(const ForwardParams& p, const ForwardPlan& plan, cudaStream_t stream) {
  return common::with_row<kBiasStationaryConfigs>(plan.row, [&](auto row) {
    constexpr BiasStationaryConfig kConfig = kBiasStationaryConfigs[row()];
    using Kernel = ForwardBiasStationaryKernel<Element, kConfig, false>;
    if constexpr (Kernel::kLoadsAhead) {
      using OwnBiasKernel = ForwardBiasStationaryKernel<Element, kConfig, true>;
      if (OwnBiasKernel::OwnBias::fits(p)) return launch_forward_bias_stationary<OwnBiasKernel>(p, plan, stream);
    }
    return launch_forward_bias_stationary<Kernel>(p, plan, stream);
  });
}

}  // namespace flash_attn_ext::sm80
