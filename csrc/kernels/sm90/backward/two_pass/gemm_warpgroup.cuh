// A consumer warpgroup of the GEMM kernel: it computes dV = P^T dO or dK = scale * dS^T Q of 64 keys.
#pragma once

#include "kernels/epilogue/store_quads.cuh"
#include "kernels/sm90/backward/partial_sums.cuh"
#include "kernels/sm90/backward/two_pass/traits.h"

namespace flash_attn_ext::sm90 {

template <class Traits>
struct GemmWarpgroup {
  using Element = typename Traits::Element;
  using Shared = TwoPassGemmShared<Traits>;
  using Work = typename Shared::Work;

  const TwoPassArguments& args;
  Shared& shared;
  const int warpgroup;
  typename decltype(Shared::pipeline)::State state{};
  typename decltype(Shared::work_pipeline)::State work_state{};

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (;;) {
      shared.work_pipeline.consumer_wait(work_state);
      const Work& work = shared.work[work_state.stage];
      if (uniform(work.batch) == Work::kEnd) break;
      if (Traits::kDims.qk == Traits::kDims.v || uniform(work.is_dk) != 0) {
        multiply<Traits::kDims.qk>(work);
      } else {
        multiply<Traits::kDims.v>(work);
      }
      consumer_release(shared.work_pipeline.empty[work_state.stage]);
      work_state.advance();
    }
  }

 private:
  template <int kWidth>
  using Sums = tile::WarpgroupAccumulator<kWidth>;

  template <int kWidth>
  __device__ __forceinline__ void multiply(const Work& work) {
    Sums<kWidth> sums;
    PartialSums<Sums<kWidth>>::load(sums, partial_of(work), !args.tiles.begins_matrix());
    if constexpr (Traits::kSkipsTiles) {
      iterate_stored<kWidth>(sums);
    } else if constexpr (Traits::kHasParts) {
      if (is_half_part(work)) {
        iterate_all<kWidth, kWidth / 2>(work, sums);
      } else {
        iterate_all<kWidth, kWidth>(work, sums);
      }
    } else {
      iterate_all<kWidth, kWidth>(work, sums);
    }
    if (args.tiles.ends_matrix()) {
      store(work, sums);
    } else {
      PartialSums<Sums<kWidth>>::store(partial_of(work), sums);
    }
    __syncwarp();  // unless the warp is converged, ptxas keeps no descriptor in uniform registers
  }

  __device__ __forceinline__ float* partial_of(const Work& work) const {
    constexpr int kFloats = PartialSums<Sums<Traits::kColumns>>::kFloats;
    return args.workspace.key_sums + (int64_t{work.partial} * Traits::kWarpgroups + warpgroup) * kFloats;
  }

  // Where the last column part of a result is at most half as wide as the others, half of its GEMM is left out.
  __device__ __forceinline__ bool is_half_part(const Work& work) const {
    const int64_t columns = work.is_dk ? args.params.head_dim_qk : args.params.head_dim_v;
    return uniform(static_cast<int>(columns) - work.first_column <= kColumnsOfPart / 2) != 0;
  }

  template <int kWidth, int kColumns>
  __device__ __forceinline__ void iterate_all(const Work& work, Sums<kWidth>& sums) {
    // The query tiles that see this warpgroup's keys are consecutive. The others see only keys of other warpgroups.
    const TileRange own = work.own[warpgroup];
    const auto group = static_cast<int>(args.params.queries_per_key_head());
    const int iterations = uniform(max(work.end - work.begin, 0) * group);
    const int steps = uniform(max(own.end - own.begin, 0) * group);
    const int before = uniform(steps > 0 ? (own.begin - work.begin) * group : iterations);
    drain(before);
#pragma unroll 1
    for (int i = 0; i < steps; ++i) step<kWidth, kColumns>(sums);
    drain(iterations - before - steps);
  }

  // Iterates over materialised tiles, where a mask may hide whole tiles. The producer says for each iteration which
  // warpgroups have one.
  template <int kWidth>
  __device__ __forceinline__ void iterate_stored(Sums<kWidth>& sums) {
#pragma unroll 1
    for (;;) {
      shared.pipeline.consumer_wait(state);
      const int iteration = uniform(shared.iterations[state.stage]);
      if (iteration == Shared::kEnd) break;
      if (iteration >> warpgroup & 1) {
        step<kWidth, kWidth>(sums);
      } else {
        release();
      }
    }
    release();
  }

  // Multiplies the first kColumns columns of a stage.
  template <int kWidth, int kColumns>
  __device__ __forceinline__ void step(Sums<kWidth>& sums) {
    using RightTile = typename Traits::template RightTile<kWidth>;
    state.stage = uniform(state.stage);
    shared.pipeline.consumer_wait(state);
    // A tile that is narrower than its stage is at the beginning of the stage.
    const auto right = tile::SmemOperand(shared.right[0]).after(state.stage).template as<RightTile>();
    const auto left = tile::SmemOperand(shared.left[0][0]).after(state.stage * Traits::kWarpgroups + warpgroup);
    tile::add_transposed_gemm<kColumns>(sums, left, right);
    ptx::wait_wgmma<0>();
    ptx::pin_registers(sums.c[0]);
    release();
  }

  // Drains iterations whose queries see only keys of other warpgroups.
  __device__ __forceinline__ void drain(int iterations) {
#pragma unroll 1
    for (int i = 0; i < iterations; ++i) {
      shared.pipeline.consumer_wait(state);
      release();
    }
  }

  __device__ __forceinline__ void release() {
    consumer_release(shared.pipeline.empty[state.stage]);
    state.advance();
  }

  // The rows of the sums are keys in the order of materialised tiles (MaterialisedTiles). Two warps share 32
  // neighbouring keys, and each of them has every second group of four, or where tiles have keys in order 16
  // neighbouring ones.
  static constexpr int kHalf = MaterialisedTiles::kRows / 2;
  __device__ __forceinline__ static int warp_in_half() { return tile::warp() % 2; }
  __device__ __forceinline__ int first_of_half() const {
    return warpgroup * Traits::kRows + tile::warp() % 4 / 2 * kHalf;
  }
  __device__ __forceinline__ static int key_in_half(int r) {
    const int place = tile::lane() / 4;
    if (Traits::kKeysInOrder) return kHalf / 2 * warp_in_half() + 8 * r + place;
    return 8 * (place / 2) + 4 * warp_in_half() + 2 * r + place % 2;
  }

  template <class Acc>
  __device__ __forceinline__ void store(const Work& work, Acc& sums) const {
    const attention::BackwardParams& p = args.params;
    const bool is_dk = work.is_dk;
    const attention::MatrixView& to = is_dk ? p.dk : p.dv;
    const int first_key = work.tile * Traits::kRows + first_of_half();
    const int rows = work.seen.num_keys - first_key;
    if (rows <= 0) return;
    if (is_dk) sums.scale(static_cast<float>(p.score_mod.scale));
    const bool needs_recompute = store_row_chunks<Element>(
        {.data = to.row<Element>(work.batch, work.key_head, work.key_begin + first_key) + work.first_column,
         .row_stride = to.row_stride,
         .column_stride = to.column_stride,
         .rows = rows,
         .columns = static_cast<int>(is_dk ? p.head_dim_qk : p.head_dim_v) - work.first_column},
        sums, [](int r) { return key_in_half(r); });
    if (needs_recompute) args.workspace.dkdv_nan_flags[work.flags + first_of_half() / kHalf] = 1;
  }
};

}  // namespace flash_attn_ext::sm90
