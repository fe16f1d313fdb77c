// Forward mode, query-stationary: tangents of O and of the LSE, with the scores recomputed from the saved LSE.
//
//   S = scale * Q K^T    S' = scale * (Q' K^T + Q K'^T)    P = exp(S - LSE)
//   LSE' = rowsum(P S') + exp(sink - LSE) * sink'          O' = (P S') V + P V' - LSE' * O
//
// Primes are tangents. P is final, so nothing is rescaled.
//
// Grid: one CTA per (batch, query head, query tile), longest tiles first. Each warp owns kTile.queries / kTile.warps
// rows: S, S' and O' live in its registers, and P S' and P are left operands from there. Shared memory: Q and Q', and
// tiles of K and K', V and V'. With two stages, the loads of V and V' overlap S and S', and the loads of the next K and
// K' overlap O'. With one stage, K and V alternate in it. CTAs of the same SM hide each other's latency. An absent
// tangent is a tile of zeros.
#pragma once

#include <type_traits>

#include "kernels/common/rows/tangent_row.cuh"
#include "kernels/config/sm80.h"
#include "kernels/epilogue/store_rows.cuh"
#include "kernels/schedule/block.cuh"
#include "kernels/schedule/head_tiles.h"
#include "kernels/score/score_tile.cuh"
#include "kernels/sm80/launch.cuh"
#include "kernels/sm80/sm80_kernels.h"
#include "ptx/math.h"
#include "tile/sm80/copy_rows.h"
#include "tile/sm80/gemm_tangents.h"

namespace flash_attn_ext::sm80 {

using attention::TangentParams;

template <class ElementType, int kHeadDimValue>
struct TangentKernel {
  using Element = ElementType;
  static constexpr int kHeadDim = kHeadDimValue;
  static constexpr TileShape kTile = tangent_tile(sizeof(Element), kHeadDim);
  static constexpr int kThreads = kTile.warps * kWarpSize;
  static constexpr int kRowsPerWarp = kTile.queries / kTile.warps;
  static constexpr bool kOneStage = kTile.stages == 1;
  // P S' may exceed the largest number of float16, and P of a long row may be less than its smallest normal number.
  static constexpr bool kFitsRange = std::is_same_v<Element, __half>;

  using Scores = tile::Accumulator<kRowsPerWarp / 16, kTile.keys / 8>;
  using Output = tile::Accumulator<kRowsPerWarp / 16, kHeadDim / 8>;
  using Where = ScoreTile<Rows::kQueries, Scores>;
  using Queries = tile::DualTile<tile::SharedTile<Element, kTile.queries, kHeadDim>>;
  using Keys = tile::DualTile<tile::SharedTile<Element, kTile.keys, kHeadDim>>;

  struct Shared {
    Queries q;
    Keys stages[kTile.stages];

    __device__ __forceinline__ Keys& k() { return stages[0]; }
    __device__ __forceinline__ Keys& v() { return stages[kTile.stages - 1]; }
  };

  const TangentParams& p;
  Shared& shared;
  HeadCoord coord;
  int first_query;
  int num_keys;
  float lse[Scores::kThreadRows];          // times log2(e); +inf for a query that sees no key
  float lse_tangent[Scores::kThreadRows];  // this thread's share, as in rounded_sum
  float rounded_sum[Scores::kThreadRows];  // of P S' as rounded for its GEMM with V
  Output out_tangent;
  int scale_log2 = kFitsRange ? kLargestScaleLog2
                              : 0;  // out_tangent and rounded_sum are scaled by 2^scale_log2, uniformly in a warp

  // Returns whether the warp's rows have a NaN.
  __device__ __forceinline__ bool run() {
    const attention::Interval first = p.visibility.keys_of<int>(first_query, coord.sequence);
    const attention::Interval last = p.visibility.keys_of<int>(first_query + num_queries() - 1, coord.sequence);
    num_keys = static_cast<int>(coord.sequence.num_keys);
    out_tangent.clear();
#pragma unroll
    for (int r = 0; r < Scores::kThreadRows; ++r) {
      lse_tangent[r] = rounded_sum[r] = 0.0f;
      lse[r] = INFINITY;
      if (exists(r) && saved_lse(r) != -INFINITY) lse[r] = saved_lse(r) * kLog2e;
    }
    if (first.begin < last.end) stream(tile_range<kTile.keys, uint32_t>(first, last));
    return finish();
  }

 private:
  // Rows of a matrix, and of its tangent.
  struct Source {
    const attention::MatrixView& primal;
    const attention::MatrixView& tangent;
    int64_t head;
    int64_t first_row;
    int64_t columns;
  };

  __device__ __forceinline__ int num_queries() const {
    return static_cast<int>(min(coord.sequence.num_queries - first_query, int64_t{kTile.queries}));
  }
  __device__ __forceinline__ int first_warp_query() const { return first_query + tile::warp() * kRowsPerWarp; }
  // The thread's row r: its index in the sequence, and in the tensors.
  __device__ __forceinline__ int query(int r) const { return first_warp_query() + Scores::row(r); }
  __device__ __forceinline__ int64_t row(int r) const { return coord.sequence.query_begin + query(r); }
  __device__ __forceinline__ bool exists(int r) const { return query(r) < coord.sequence.num_queries; }
  __device__ __forceinline__ float saved_lse(int r) const {
    return *p.lse.at<const float>(coord.sequence.batch, coord.head, row(r));
  }

  template <class Dual>
  __device__ __forceinline__ void load(Dual& target, const Source& from, int rows) {
    const auto copy = [&](auto& tile, const attention::MatrixView& view, int num_rows) {
      const auto* data = view.row<const Element>(coord.sequence.batch, from.head, from.first_row);
      tile::copy_rows_async<kThreads>(tile, {data, view.row_stride, static_cast<int>(from.columns)}, num_rows);
    };
    copy(target.primal, from.primal, rows);
    const bool absent = from.tangent.data == nullptr;
    copy(target.tangent, absent ? from.primal : from.tangent, absent ? 0 : rows);
  }
  __device__ __forceinline__ void load_keys(int tile) {
    const int first = tile * kTile.keys;
    load(shared.k(), {p.k, p.k_tangent, coord.key_head, coord.sequence.key_begin + first, p.head_dim_qk},
         num_keys - first);
    ptx::commit_copies();
  }
  __device__ __forceinline__ void load_values(int tile) {
    const int first = tile * kTile.keys;
    load(shared.v(), {p.v, p.v_tangent, coord.key_head, coord.sequence.key_begin + first, p.head_dim_v},
         num_keys - first);
    ptx::commit_copies();
  }

  __device__ __forceinline__ void stream(const TileRange& tiles) {
    load(shared.q, {p.q, p.q_tangent, coord.head, coord.sequence.query_begin + first_query, p.head_dim_qk},
         num_queries());
    load_keys(tiles.begin);
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
      const int next = tile + 1 < tiles.end ? tile + 1 : -1;
      // Masked tiles have a body of their own: without branches between GEMMs, the compiler interleaves them with the
      // instructions in between.
      if (tiles.full(tile)) {
        attend<false>(tile, next);
      } else {
        attend<true>(tile, next);
      }
    }
    __syncthreads();  // the tile of Q is reused as staging
  }

  template <bool kPartial>
  __device__ __forceinline__ void attend(int tile, int next) {
    ptx::wait_copies<0>();
    __syncthreads();  // K, and at first Q, have arrived, and no warp reads V any more
    if (!kOneStage) load_values(tile);
    Scores scores;
    Scores tangents;
    scores.clear();
    tangents.clear();
    tile::multiply_rows_and_tangents(scores, tangents, shared.q, tile::warp() * kRowsPerWarp, shared.k());
    if (kOneStage) {
      __syncthreads();  // no warp reads K any more
      load_values(tile);
    }
    weigh<kPartial>(scores, tangents, {p, coord, first_warp_query(), int64_t{tile} * kTile.keys});
    ptx::wait_copies<0>();
    __syncthreads();  // V has arrived, and no warp reads K any more
    if (!kOneStage && next >= 0) load_keys(next);
    tile::multiply_registers_with_tangent(out_tangent, tangents, scores, shared.v());
    if (kOneStage && next >= 0) {
      __syncthreads();  // no warp reads V any more
      load_keys(next);
    }
  }

  // q.k -> P, and its tangent -> P S'. Masked elements are set to 0 rather than multiplied by 0, since they may be NaN.
  template <bool kPartial>
  __device__ __forceinline__ void weigh(Scores& scores, Scores& tangents, const Where& where) {
    typename Where::Visible::Row visible[Scores::kThreadRows] = {};  // of masked tiles
    if constexpr (kPartial) {
      const typename Where::Visible columns = where.visible();
#pragma unroll
      for (int r = 0; r < Scores::kThreadRows; ++r) visible[r] = Where::visible_row(columns, r);
    }
    const auto scale = static_cast<float>(p.score_mod.scale);
#pragma unroll
    for (int r = 0; r < Scores::kThreadRows; ++r) {
      float sum = 0.0f;  // of this tile only, since the sum of a long row would round single terms away
#pragma unroll
      for (int j = 0; j < Scores::kColumnTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float weight = ptx::exp2(scores.at(r, j, e) * (scale * kLog2e) - lse[r]);
          const float weighted = weight * (tangents.at(r, j, e) * scale);
          const bool hidden = kPartial && !visible[r].is_visible(j, e);
          scores.at(r, j, e) = hidden ? 0.0f : weight;
          tangents.at(r, j, e) = hidden ? 0.0f : weighted;
          sum += tangents.at(r, j, e);
        }
      }
      lse_tangent[r] += sum;
    }
    if constexpr (kFitsRange) fit_range(scores, tangents);
#pragma unroll
    for (int r = 0; r < Scores::kThreadRows; ++r) {
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < Scores::kColumnTiles; ++j) sum += sum_as_rounded(tangents.at(r, j, 0), tangents.at(r, j, 1));
      rounded_sum[r] += sum;
    }
  }

  // Scales P and P S' by the largest power of two, up to that of a P of 1, that keeps those of all tiles so far in
  // range.
  __device__ __forceinline__ void fit_range(Scores& scores, Scores& tangents) {
    float largest = 0.0f;
    for_each_element<Scores>(
        [&](int r, int, int j, int e, int) { largest = fmaxf(largest, fabsf(tangents.at(r, j, e))); });
    const auto exponent = static_cast<int>(__reduce_max_sync(0xFFFFFFFFu, __float_as_uint(largest)) >> 23) - 127;
    const int fitting_log2 = kLargestScaleLog2 - exponent;
    if (fitting_log2 < scale_log2 && exponent < 128) {  // no scale fits an infinity
      const float factor = power_of_two(fitting_log2 - scale_log2);
      out_tangent.scale(factor);
#pragma unroll
      for (int r = 0; r < Scores::kThreadRows; ++r) rounded_sum[r] *= factor;
      scale_log2 = fitting_log2;
    }
    scores.scale(power_of_two(scale_log2));
    tangents.scale(power_of_two(scale_log2));
  }
  static constexpr int kLargestScaleLog2 = 14;
  __device__ __forceinline__ static float power_of_two(int exponent) { return exp2f(static_cast<float>(exponent)); }

  __device__ __forceinline__ static float sum_as_rounded(float low, float high) {
    if constexpr (sizeof(Element) == 4) {
      return low + high;
    } else {
      const float2 rounded = ptx::unpack(ptx::pack(low, high, Element{}), Element{});
      return rounded.x + rounded.y;
    }
  }

  __device__ __forceinline__ bool finish() {
#pragma unroll
    for (int r = 0; r < Scores::kThreadRows; ++r) {
      lse_tangent[r] = tile::quad_sum(lse_tangent[r]);
      rounded_sum[r] = tile::quad_sum(rounded_sum[r]);
      if (!exists(r)) continue;
      if (p.sink_tangent != nullptr) {
        const float part = common::sink_part(p, coord.head, saved_lse(r));
        lse_tangent[r] += part;
        rounded_sum[r] += kFitsRange ? part * power_of_two(scale_log2) : part;
      }
      subtract_output(r);
      if (tile::lane() % 4 == 0) {
        *p.lse_tangent.at<float>(coord.sequence.batch, coord.head, row(r)) = lse_tangent[r];
      }
    }
    if constexpr (kFitsRange) out_tangent.scale(power_of_two(-scale_log2));
    const int first_row = tile::warp() * kRowsPerWarp;
    const int64_t first = first_warp_query();
    store_rows<Element>(
        {.data = p.out_tangent.row<Element>(coord.sequence.batch, coord.head, coord.sequence.query_begin + first),
         .row_stride = p.out_tangent.row_stride,
         .column_stride = p.out_tangent.column_stride,
         .rows = static_cast<int>(min(coord.sequence.num_queries - first, int64_t{kRowsPerWarp})),
         .columns = static_cast<int>(p.head_dim_v)},
        out_tangent, shared.q.primal, first_row);
    return __any_sync(0xFFFFFFFFu, out_tangent.has_nan());
  }

  // Subtracts LSE' * O from a row of O', with LSE' as the sum of the rounded P S'. Then rounding a P S' by x changes O'
  // by x (V - O) of its key, and a row that sees one key is exact.
  __device__ __forceinline__ void subtract_output(int r) {
    const auto* out = p.out.row<const Element>(coord.sequence.batch, coord.head, row(r));
#pragma unroll
    for (int j = 0; j < Output::kColumnTiles; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = Output::column(j, e);
        if (column >= p.head_dim_v) continue;
        out_tangent.at(r, j, e) -= rounded_sum[r] * static_cast<float>(out[column * p.out.column_stride]);
      }
    }
  }
};

// Recomputes the warp's rows without tensor cores. It derives the work tile again, so that the mainloop holds no
// register for it.
template <class Kernel>
__device__ __forceinline__ void tangents_without_tensor_cores(const TangentParams& p, const Schedule& schedule) {
  const QueryBlock block = query_block<Kernel>(p, schedule);
  const int64_t begin = block.first_query + tile::warp() * Kernel::kRowsPerWarp;
  const int64_t end = min(begin + Kernel::kRowsPerWarp, block.coord.sequence.num_queries);
  const common::HeadRows head = common::head_rows(p, block.coord.sequence, block.coord.head);
#pragma unroll 1
  for (int64_t query = begin; query < end; ++query) {
    common::compute_tangent_row<typename Kernel::Element>(p, head, query);
  }
}

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kTile.ctas_per_sm)
    tangent_kernel(const __grid_constant__ TangentParams p, const __grid_constant__ Schedule schedule) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const QueryBlock block = query_block<Kernel>(p, schedule);
  if (block.first_query >= block.coord.sequence.num_queries) return;
  Kernel kernel = {p, *reinterpret_cast<typename Kernel::Shared*>(shared_memory), block.coord,
                   static_cast<int>(block.first_query)};
  if (kernel.run()) tangents_without_tensor_cores<Kernel>(p, schedule);
}

template <class Element, int kHeadDim>
cudaError_t tangents(const TangentParams& p, const TangentPlan& plan, cudaStream_t stream) {
  using Kernel = TangentKernel<Element, kHeadDim>;
  const Schedule schedule = make_schedule(p, {.pairs = all_pairs(p),
                                              .rows = Rows::kQueries,
                                              .tile_rows = Kernel::kTile.queries,
                                              .slices = 1,
                                              .element_bytes = 2 * sizeof(Element),  // an element and its tangent
                                              .l2_bytes = plan.l2_bytes});
  return launch<Kernel>(tangent_kernel<Kernel>, p, schedule, stream);
}

}  // namespace flash_attn_ext::sm80
