// Forward pass of many short heads: up to 128 queries and keys, where every query sees every key (Dao 2023,
// "FlashAttention-2", algorithm 1, with two key tiles).
//
// Grid: persistent CTAs with a static tile scheduler. A work tile is kHeadsRows queries of a head. Short heads spend
// most of their time in prologue and epilogue, so the loads of the next Q, K and V overlap the current work tile.
// Each warp owns 32 rows. The exponentials of the first half of the keys are interleaved with the QK GEMM of the second
// half, and those of the second half with the PV GEMM of the first half.
// Shared memory: two stages of Q, K and V. There are two barriers per work tile: Q and K have arrived, and V has
// arrived.
#pragma once

#include "kernels/common/rows/attention_rows.cuh"
#include "kernels/config/sm80.h"
#include "kernels/config/sm80_forward.h"
#include "kernels/schedule/schedule.cuh"
#include "kernels/score/score_tile.cuh"
#include "kernels/sm80/forward/forward_rows.cuh"
#include "kernels/sm80/launch.cuh"
#include "kernels/sm80/sm80_kernels.h"
#include "tile/sm80/copy_rows.h"
#include "tile/sm80/gemm.h"

namespace flash_attn_ext::sm80 {

template <class ElementType>
struct ForwardHeadsKernel {
  using Element = ElementType;
  using Traits =
      KernelTraits<Element,
                   kForwardConfigs[find_row(kForwardConfigs, sizeof(Element), kHeadsHeadDim, ScoreMode::kScaleOnly)]>;
  using WarpRows = ForwardRows<Traits>;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kRowsPerWarp = WarpRows::kRowsPerWarp;
  static constexpr int kThreads = kHeadsRows / kRowsPerWarp * kWarpSize;
  static constexpr int kHalf = kHeadsRows / 2;  // of the keys

  using Tile = tile::SharedTile<Element, kHeadsRows, kHeadDim>;
  using Half = tile::SharedTile<Element, kHalf, kHeadDim>;
  using Scores = tile::Accumulator<kRowsPerWarp / 16, kHalf / 8>;
  static constexpr int kSteps = kHalf / tile::kInner<Element>;
  using Packed = tile::PackedColumns<Scores::kRowTiles>;  // P of one step of the PV GEMM
  // A GEMM of one half has as many steps as the other half has rows per thread, so each step is interleaved with one
  // row.
  static_assert(kSteps == Scores::kThreadRows && kHeadDim / tile::kInner<Element> == Scores::kThreadRows);

  struct Stage {
    Tile q;
    Tile k;
    Tile v;
  };
  struct Shared {
    Stage stages[2];
  };

  // A work tile: queries [first_query, ...) of a head. It has 32-bit numbers, since registers hold the next one beside
  // the current one.
  struct WorkTile {
    int batch;
    int head;
    int key_head;
    int first_query;
  };

  const ForwardParams& p;
  const Schedule& schedule;
  Shared& shared;

  __device__ __forceinline__ void run() {
    uint32_t index = blockIdx.x;
    WorkTile work_tile = work_tile_at(index);
    load_q_and_k(shared.stages[0], work_tile);
    load_v(shared.stages[0], work_tile);
    for (int current = 0;; current = 1 - current) {
      Stage& stage = shared.stages[current];
      Stage& other = shared.stages[1 - current];
      index += gridDim.x;
      const bool is_last = index >= schedule.num_blocks;
      const WorkTile next = is_last ? work_tile : work_tile_at(index);
      ptx::wait_copies<1>();
      __syncthreads();  // Q and K have arrived, and no warp reads the other stage any more
      Scores first;
      Scores second;
      const HalfSoftmax before = multiply_keys(first, second, work_tile, stage);
      Packed first_p[kSteps];
      pack(first_p, first);
      if (is_last) {
        ptx::commit_copies();  // an empty group, so that wait_copies<1> always has the same meaning
      } else {
        load_q_and_k(other, next);
      }
      WarpRows rows = {p};
      multiply_values(rows, first_p, second, before, stage);
      if (is_last) {
        ptx::commit_copies();
      } else {
        load_v(other, next);
      }
      rows.finish(coord_of(work_tile), work_tile.first_query, 0, stage.q);
      // A NaN may be a weight of 0 times a NaN or infinity in V: such rows are recomputed without tensor cores.
      if (__any_sync(0xFFFFFFFFu, rows.out.has_nan())) without_tensor_cores(work_tile);
      if (is_last) break;
      work_tile = next;
    }
  }

 private:
  // The softmax state of the first half of the keys.
  struct HalfSoftmax {
    float m[Scores::kThreadRows];
    float l[Scores::kThreadRows];
  };

  __device__ __forceinline__ static int warp_row() { return tile::warp() * kRowsPerWarp; }
  __device__ __forceinline__ int num_keys() const { return static_cast<int>(p.sequences.max_seqlen_k); }
  __device__ __forceinline__ float exponent_scale() const { return static_cast<float>(p.score_mod.scale) * kLog2e; }

  __device__ __forceinline__ WorkTile work_tile_at(uint32_t index) const {
    const Place at = schedule.place(index);
    return {static_cast<int>(at.batch), static_cast<int>(at.key_head * schedule.group + at.head_of_group),
            static_cast<int>(at.key_head), static_cast<int>(at.tile) * kHeadsRows};
  }

  __device__ __forceinline__ HeadCoord coord_of(const WorkTile& work_tile) const {
    return {{work_tile.batch, 0, 0, p.sequences.max_seqlen_q, p.sequences.max_seqlen_k},
            work_tile.head,
            work_tile.key_head};
  }

  __device__ __forceinline__ static void copy(Tile& tile, const attention::MatrixView& view, const Element* rows,
                                              int num_rows) {
    tile::copy_full_width_async<kThreads, int>(tile, {rows, view.row_stride, kHeadDim}, num_rows);
  }

  __device__ __forceinline__ void load_q_and_k(Stage& stage, const WorkTile& work_tile) const {
    const int num_queries = static_cast<int>(p.sequences.max_seqlen_q) - work_tile.first_query;
    copy(stage.q, p.q, p.q.row<const Element>(work_tile.batch, work_tile.head, work_tile.first_query), num_queries);
    copy(stage.k, p.k, p.k.row<const Element>(work_tile.batch, work_tile.key_head, 0), num_keys());
    ptx::commit_copies();
  }
  __device__ __forceinline__ void load_v(Stage& stage, const WorkTile& work_tile) const {
    copy(stage.v, p.v, p.v.row<const Element>(work_tile.batch, work_tile.key_head, 0), num_keys());
    ptx::commit_copies();
  }

  // Computes P of the first half, relative to the maximum of that half, and q.k of the second half.
  __device__ __forceinline__ HalfSoftmax multiply_keys(Scores& first, Scores& second, const WorkTile& work_tile,
                                                       const Stage& stage) const {
    HalfSoftmax result;
    first.clear();
    second.clear();
    tile::multiply_head_dims(first, stage.q, warp_row(), stage.k.template rows_from<kHalf>(0));
#pragma unroll
    for (int r = 0; r < Scores::kThreadRows; ++r) result.m[r] = row_maximum(first, r);
    multiply_steps(second, stage.q, stage.k.template rows_from<kHalf>(kHalf),
                   [&](int r) { result.l[r] = exponentiate(first, r, result.m[r]); });
    if (num_keys() < kHeadsRows) {
      ScoreTile<Rows::kQueries, Scores>{p, coord_of(work_tile), work_tile.first_query + warp_row(), kHalf}
          .hide_invisible(second);
    }
    return result;
  }

  // scores += Q rows . keys^T. meanwhile(step) is called between the mma of a step and those of the next one.
  template <class Meanwhile>
  __device__ __forceinline__ static void multiply_steps(Scores& scores, const Tile& q, const Half& keys,
                                                        Meanwhile&& meanwhile) {
    const tile::LeftOperand<Tile> left(q, warp_row());
    const tile::RightOperandRows<Half> right(keys);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int k = step * tile::kInner<Element>;
      uint32_t a[Scores::kRowTiles][4];
#pragma unroll
      for (int i = 0; i < Scores::kRowTiles; ++i) left.load(a[i], 16 * i, k);
#pragma unroll
      for (int j = 0; j < Scores::kColumnTiles; j += 2) {
        uint32_t b[4];
        right.load(b, 8 * j, k);
#pragma unroll
        for (int i = 0; i < Scores::kRowTiles; ++i) {
          tile::multiply_step<Element>(scores.c[i][j], a[i], b[0], b[1]);
          tile::multiply_step<Element>(scores.c[i][j + 1], a[i], b[2], b[3]);
        }
      }
      meanwhile(step);
    }
  }

  __device__ __forceinline__ static void pack(Packed (&packed)[kSteps], const Scores& p) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < Scores::kRowTiles; ++i) tile::to_operand<Element>(packed[step].a[i], p, i, step);
    }
  }

  // Computes O, m and l of both halves.
  __device__ __forceinline__ void multiply_values(WarpRows& rows, const Packed (&first_p)[kSteps], Scores& second,
                                                  const HalfSoftmax& before, const Stage& stage) const {
    constexpr int kInner = tile::kInner<Element>;
#pragma unroll
    for (int r = 0; r < Scores::kThreadRows; ++r) rows.running.m[r] = fmaxf(before.m[r], row_maximum(second, r));
    ptx::wait_copies<1>();
    __syncthreads();  // V has arrived
    rows.out.clear();
#pragma unroll
    for (int r = 0; r < kSteps; ++r) {
      tile::multiply_registers(rows.out, first_p[r], stage.v.template rows_from<kInner>(kInner * r));
      rows.running.l[r] = exponentiate(second, r, rows.running.m[r]);
    }
#pragma unroll
    for (int r = 0; r < Scores::kThreadRows; ++r) {
      const float factor = ptx::exp2((before.m[r] - rows.running.m[r]) * exponent_scale());
      rows.out.scale_row(r, factor);
      rows.running.l[r] += before.l[r] * factor;
    }
    tile::multiply_registers(rows.out, second, stage.v.template rows_from<kHalf>(kHalf));
  }

  __device__ __forceinline__ static float row_maximum(const Scores& scores, int r) {
    float maximum = scores.at(r, 0, 0);
#pragma unroll
    for (int j = 0; j < Scores::kColumnTiles; ++j) {
      maximum = fmaxf(maximum, fmaxf(scores.at(r, j, 0), scores.at(r, j, 1)));
    }
    return tile::quad_max(maximum);
  }

  // scores -> P of a row. Returns the thread's share of their sum.
  __device__ __forceinline__ float exponentiate(Scores& scores, int r, float maximum) const {
    const float c = exponent_scale();
    const float shift = maximum * c;
    float sums[2] = {0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < Scores::kColumnTiles; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& score = scores.at(r, j, e);
        score = ptx::exp2(score * c - shift);
        sums[e] += score;
      }
    }
    return sums[0] + sums[1];
  }

  __device__ __forceinline__ void without_tensor_cores(const WorkTile& work_tile) const {
    const int64_t begin = work_tile.first_query + warp_row();
    const int64_t end = min(begin + kRowsPerWarp, p.sequences.max_seqlen_q);
    const common::HeadRows head = common::head_rows(p, coord_of(work_tile).sequence, work_tile.head);
    for (int64_t query = begin; query < end; ++query) {
      common::compute_forward_row<Element>(p, head, query, common::ColumnRange{});
    }
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, kWholeHeadCtasPerSm)
    forward_heads_kernel(const __grid_constant__ ForwardParams p, const __grid_constant__ Schedule schedule) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  Kernel{p, schedule, *reinterpret_cast<typename Kernel::Shared*>(shared_memory)}.run();
}

template <class Element>
cudaError_t forward_heads(const ForwardParams& p, const ForwardPlan& plan, cudaStream_t stream) {
  using Kernel = ForwardHeadsKernel<Element>;
  const Schedule schedule = make_schedule(p, {.pairs = all_pairs(p),
                                              .rows = Rows::kQueries,
                                              .tile_rows = kHeadsRows,
                                              .slices = 1,
                                              .element_bytes = sizeof(Element),
                                              .l2_bytes = plan.l2_bytes});
  const int64_t blocks = std::min<int64_t>(schedule.num_blocks, plan.persistent_ctas);
  static_assert(sizeof(typename Kernel::Shared) <= kSharedBytes);
  return common::launch_blocks<Kernel>(forward_heads_kernel<Kernel>,
                                       schedule.num_blocks > INT32_MAX ? UINT32_MAX : blocks, stream, p, schedule);
}

}  // namespace flash_attn_ext::sm80
