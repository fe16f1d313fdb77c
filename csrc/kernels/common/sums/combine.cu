// Split-KV combine: O = sum of exp(m_i - m) O_i / sum of exp(m_i - m) l_i over the splits i of a row (Milakov &
// Gimelshein 2018, section 3.1; Dao et al. 2023, "Flash-Decoding").
//
// Grid: rows of work tiles, each with one warp. Where rows have many splits, each has a CTA whose warps share them, and
// the first warp merges the partial results in a fixed order. The kernel is latency-bound, since the splits of a query
// are only some tens of rows.
// Part of the latency is that of instructions, which come from global memory once other kernels have run. So CTAs that
// start while the split-KV kernel still runs execute a warm-up pass: it combines no splits and writes nothing
// (docs/kernels/log/split.md, "A rehearsal of the kernel that joins parts").
#include <type_traits>

#include "attention/division.h"
#include "kernels/common/launch/launch_early.cuh"
#include "kernels/common/sums/combine.h"
#include "kernels/config/combine.h"
#include "ptx/dependent_launch.h"

namespace flash_attn_ext::common {
namespace {

// The softmax states of a row's splits. Each lane holds those of some splits, and all lanes hold that of the whole row.
struct RowStates {
  static constexpr int kKnown = 2;  // splits whose maximum a lane keeps

  const SplitRows& rows;
  const TileSplits& splits;
  int step;
  int row;
  float maxima[kKnown];
  attention::SoftmaxState<float> own;
  attention::SoftmaxState<float> all;

  __device__ __forceinline__ const float2& of(int split) const { return rows.state_of(splits.slot(split, step), row); }

  __device__ __forceinline__ void load() {
#pragma unroll
    for (int i = 0; i < kKnown; ++i) {
      const int split = i * kWarpSize + tile::lane();
      const float2 state = split < splits.count ? of(split) : float2{-INFINITY, 0.0f};
      maxima[i] = state.x;
      own.merge({.m = state.x, .l = state.y});
    }
    for (int split = kKnown * kWarpSize + tile::lane(); split < splits.count; split += kWarpSize) {
      const float2 state = of(split);
      own.merge({.m = state.x, .l = state.y});
    }
    all = {.m = maximum_over_warp(own.m), .l = 0.0f};
    all.l = sum_over_warp(own.l * exp(own.m - all.shift()));
#pragma unroll
    for (int i = 0; i < kKnown; ++i) maxima[i] = exp(maxima[i] - all.shift());
  }

  // exp(m_split - m) for the same split in all lanes: known_weight for a split whose maximum a lane keeps, weight for
  // any.
  template <int kOf>
  __device__ __forceinline__ float known_weight(int split) const {
    static_assert(kOf < kKnown);
    return __shfl_sync(kAllLanes, maxima[kOf], split % kWarpSize);
  }
  __device__ __forceinline__ float weight(int split) const { return exp(of(split).x - all.shift()); }
};

// Returns whether the row of O or its LSE holds a NaN.
template <class Element>
__device__ __forceinline__ bool holds_nan(const attention::ForwardParams& p, const RowPlace& place,
                                          const ColumnRange& columns) {
  const float lse = *p.lse.at<const float>(place.batch, place.head, place.row);
  bool found = lse != lse;
  const auto* row = p.out.row<const Element>(place.batch, place.head, place.row);
  for (int64_t column = columns.begin + tile::lane(); column < min(p.head_dim_v, int64_t{columns.end});
       column += kWarpSize) {
    const auto value = static_cast<float>(row[column * p.out.column_stride]);
    found |= value != value;
  }
  return __any_sync(kAllLanes, found);
}

// Not inlined, so that it does not share registers with the common path.
template <class Element>
__device__ __noinline__ void repair_row(const CombineParams& p, uint32_t batch, const PackedRow& at,
                                        const ColumnRange& columns) {
  compute_forward_row<Element, AnyKeys>(p, head_rows(p, p.sequence_of(batch), at.head), at.query, columns);
}

// The row that a warp or CTA combines.
struct CombinedRow {
  uint32_t work_tile;
  uint32_t batch;
  int first_column;
  int row;  // of the work tile
  PackedRow at;
  RowPlace place;
};

// Returns false where there is no such row.
__device__ __forceinline__ bool find_row(CombinedRow& combined, const CombineParams& p, uint32_t index, int columns) {
  combined.work_tile = p.rows_of_work_tile.quotient(index);
  if (combined.work_tile >= p.num_work_tiles) return false;
  combined.row = static_cast<int>(index - combined.work_tile * p.rows_of_work_tile.divisor);
  const uint32_t entry_index = p.tiles.work_tiles_of_entry.quotient(combined.work_tile);
  const RowTiles::Entry entry = p.tiles.entry(entry_index);
  const RowTiles::WorkTile work_tile =
      p.tiles.work_tile(combined.work_tile - entry_index * p.tiles.work_tiles_of_entry.divisor);
  const attention::Sequence sequence = p.sequence_of(entry.batch);
  if (combined.row >= p.tiles.count(entry, sequence)) return false;
  combined.batch = entry.batch;
  combined.first_column = static_cast<int>(work_tile.slice) * columns;
  combined.at = p.tiles.at(entry.first_row + combined.row, work_tile.head);
  combined.place = head_rows(p, sequence, combined.at.head).query_row(combined.at.query);
  return true;
}

// The splits that follow from the work list, where the host knows it. They are known before the split-KV kernel has
// ended, except whether a whole work tile has a NaN.
__device__ __forceinline__ TileSplits known_splits(const CombineParams& p, uint32_t work_tile) {
  const uint32_t tiles = p.known.key_tiles_of_work_tile.divisor;
  if (p.known.present()) return p.known.shares.splits(work_tile * tiles, (work_tile + 1) * tiles);
  const auto first_slot = static_cast<int>(work_tile) * p.splits_of_work_tile;
  return {first_slot, first_slot + 1, p.splits_of_work_tile};
}

// Merges the splits of a row, or those of a warp where a CTA shares them. The loads of partial O overlap the merging of
// the softmax states. Splits that do not exist have the weight 0.
template <class Merged, int kWarpsPerRow>
__device__ __forceinline__ Merged combine_splits(const CombineParams& p, const TileSplits& splits, int row) {
  constexpr int kAhead = kWarpsPerRow == 1 ? 4 : splits_at_once(kWarpSize * Merged::kSlots);
  const int warp = kWarpsPerRow == 1 ? 0 : tile::warp();
  typename Merged::Columns ahead[kAhead];
  const float* first = p.splits.out_row(splits.slot(warp, p.slot_step), row);
  const float* others = p.splits.out_row(splits.slot(warp + kWarpsPerRow, p.slot_step), row);
  const int64_t step = int64_t{kWarpsPerRow} * p.slot_step * p.splits.rows * p.splits.columns;
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    ahead[i] = {};
    if (warp + i * kWarpsPerRow < splits.count) ahead[i] = Merged::load(i == 0 ? first : others + (i - 1) * step);
  }
  RowStates states = {p.splits, splits, p.slot_step, row};
  states.load();
  Merged merged;
  merged.state = states.all;
  static_assert(kAhead * kWarpsPerRow <= RowStates::kKnown * kWarpSize && kWarpSize % kWarpsPerRow == 0);
  constexpr int kOfFirst = kWarpSize / kWarpsPerRow;  // splits of a warp whose weights are the first that lanes keep
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    const int split = warp + i * kWarpsPerRow;
    merged.add_weighted(ahead[i], i < kOfFirst ? states.known_weight<0>(split) : states.known_weight<1>(split));
  }
#pragma unroll 1
  for (int split = warp + kAhead * kWarpsPerRow; split < splits.count; split += kWarpsPerRow) {
    merged.add_weighted(Merged::load(p.splits.out_row(splits.slot(split, p.slot_step), row)), states.weight(split));
  }
  return merged;
}

constexpr int threads_of(int warps_per_row) {
  return kWarpSize * (warps_per_row == 1 ? kRowsOfCombineCta : warps_per_row);
}
// CTAs per SM: as many as registers allow without spills.
constexpr int blocks_of(int columns, int warps_per_row) {
  return warps_per_row > 1 ? 24 / warps_per_row : columns > 128 ? 6 : 8;
}

template <class Element, int kColumns, int kWarpsPerRow>
__global__ void __launch_bounds__(threads_of(kWarpsPerRow), blocks_of(kColumns, kWarpsPerRow))
    combine_kernel(const __grid_constant__ CombineParams p) {
  using Merged = MergedRow<kColumns>;
  constexpr bool kShares = kWarpsPerRow > 1;
  __shared__ __align__(16) float warp_out[kWarpsPerRow][kColumns];
  CombinedRow combined;
  if (!find_row(combined, p, kShares ? blockIdx.x : blockIdx.x * kRowsOfCombineCta + tile::warp(), kColumns)) return;
  const TileSplits known = known_splits(p, combined.work_tile);
  const ColumnRange columns = {combined.first_column, combined.first_column + kColumns};
  bool has_nan = false;
#pragma unroll 1
  for (int pass = ptx::kLaunchesEarly && p.warms_up ? 0 : 1; pass < 2; ++pass) {
    const bool warm_up = pass == 0;
    TileSplits splits = {};
    if (!warm_up) {
      ptx::wait_for_kernel_before();
      splits = known;
      if (p.work_tiles != nullptr && (!p.known.present() || splits.count == 1))
        splits = p.work_tiles[combined.work_tile];
      if (splits.count == 1) return;
    }
    Merged merged = combine_splits<Merged, kWarpsPerRow>(p, splits, combined.row);
    if constexpr (kShares) {
      merged.store_columns(warp_out[tile::warp()]);
      __syncthreads();
      if (!warm_up && tile::warp() != 0) return;
#pragma unroll
      for (int other = 1; other < kWarpsPerRow; ++other) merged.add_weighted(Merged::load(warp_out[other]), 1.0f);
    }
    has_nan = !warm_up && splits.count == TileSplits::kHasNan
                  ? holds_nan<Element>(p, combined.place, columns)
                  : finish_row<Element>(p, combined.place, merged, combined.first_column, !warm_up);
    if (kShares && warm_up) __syncthreads();  // no warp reads the warps' results any more
  }
  if (has_nan) repair_row<Element>(p, combined.batch, combined.at, columns);
}

}  // namespace

template <class Element, int kColumns>
cudaError_t combine(const CombineParams& params, cudaStream_t stream) {
  const int64_t rows = int64_t{params.num_work_tiles} * params.rows_of_work_tile.divisor;
  const auto launch = [&](auto warps_per_row) {
    constexpr int kWarpsPerRow = warps_per_row();
    constexpr int kRows = kWarpsPerRow == 1 ? kRowsOfCombineCta : 1;
    const int64_t blocks = attention::ceil_div(rows, kRows);
    if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
    return launch_early(combine_kernel<Element, kColumns, kWarpsPerRow>,
                        {.blocks = blocks, .threads = threads_of(kWarpsPerRow)}, stream, params);
  };
  switch (params.warps_per_row) {
    case 1:
      return launch(std::integral_constant<int, 1>{});
    case kFewCombineWarps:
      return launch(std::integral_constant<int, kFewCombineWarps>{});
    case kCombineWarps:
      return launch(std::integral_constant<int, kCombineWarps>{});
    default:
      return cudaErrorInvalidValue;
  }
}

template cudaError_t combine<__nv_bfloat16, 64>(const CombineParams&, cudaStream_t);
template cudaError_t combine<__nv_bfloat16, 128>(const CombineParams&, cudaStream_t);
template cudaError_t combine<__nv_bfloat16, 256>(const CombineParams&, cudaStream_t);
template cudaError_t combine<__half, 64>(const CombineParams&, cudaStream_t);
template cudaError_t combine<__half, 128>(const CombineParams&, cudaStream_t);
template cudaError_t combine<__half, 256>(const CombineParams&, cudaStream_t);
template cudaError_t combine<float, 64>(const CombineParams&, cudaStream_t);
template cudaError_t combine<float, 128>(const CombineParams&, cudaStream_t);
template cudaError_t combine<float, 256>(const CombineParams&, cudaStream_t);

}  // namespace flash_attn_ext::common
