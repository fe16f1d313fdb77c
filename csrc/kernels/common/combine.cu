// O = sum of exp(m_i - m) O_i / sum of exp(m_i - m) l_i over the parts i of a row, each of other keys (Milakov &
// Gimelshein 2018, section 3.1; Dao et al. 2023, "Flash-Decoding").
//
// Grid: rows of items, each with one warp, or with a whole block where rows have many parts: its warps share them, and
// the first one merges what they leave, in a fixed order. Bound: latency; the parts of a query are some tens of rows.
// Part of the latency is that of instructions, which come from memory once other kernels have run. So blocks that are
// there while the kernel before still runs rehearse: they join no parts, and write nothing.
#include <type_traits>

#include "kernels/common/combine.h"
#include "kernels/common/launch_early.cuh"
#include "kernels/tile_config_split.h"
#include "ptx/dependent_launch.h"

namespace flash_attn_ext::common {
namespace {

using sm80::kFewJoiningWarps;
using sm80::kJoiningWarps;
using sm80::kRowsOfJoiningBlock;

// The softmax states of a row's parts: each lane knows those of some, and all of them know the whole row's.
struct RowStates {
  static constexpr int kKnown = 2;  // parts that a lane keeps

  const PartRows& rows;
  const ItemParts& parts;
  int step;
  int row;
  float maxima[kKnown];
  attention::SoftmaxState<float> own;
  attention::SoftmaxState<float> all;

  __device__ __forceinline__ const float2& of(int part) const { return rows.state_of(parts.slot(part, step), row); }

  __device__ __forceinline__ void load() {
#pragma unroll
    for (int i = 0; i < kKnown; ++i) {
      const int part = i * kWarpSize + tile::lane();
      const float2 state = part < parts.count ? of(part) : float2{-INFINITY, 0.0f};
      maxima[i] = state.x;
      own.merge({.m = state.x, .l = state.y});
    }
    for (int part = kKnown * kWarpSize + tile::lane(); part < parts.count; part += kWarpSize) {
      const float2 state = of(part);
      own.merge({.m = state.x, .l = state.y});
    }
    all = {.m = maximum_over_warp(own.m), .l = 0.0f};
    all.l = sum_over_warp(own.l * exp(own.m - all.shift()));
#pragma unroll
    for (int i = 0; i < kKnown; ++i) maxima[i] = exp(maxima[i] - all.shift());
  }

  // exp(m_part - m), the same part in all lanes: one that a lane keeps, or any.
  template <int kOf>
  __device__ __forceinline__ float known_weight(int part) const {
    static_assert(kOf < kKnown);
    return __shfl_sync(kAllLanes, maxima[kOf], part % kWarpSize);
  }
  __device__ __forceinline__ float weight(int part) const { return exp(of(part).x - all.shift()); }
};

// Whether the row of O does, or its LSE.
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

// Far from the common path, whose registers it does not share.
template <class Element>
__device__ __noinline__ void repair_row(const CombineParams& p, uint32_t batch, const PackedRow& at,
                                        const ColumnRange& columns) {
  compute_forward_row<Element, AnyKeys>(p, head_item(p, p.sequence_of(batch), at.head), at.query, columns);
}

// What a warp or block joins.
struct JoinedRow {
  uint32_t item;
  uint32_t batch;
  int first_column;
  int row;  // of the item
  PackedRow at;
  RowPlace place;
};

// False where there is no such row.
__device__ __forceinline__ bool find_row(JoinedRow& joined, const CombineParams& p, uint32_t number, int columns) {
  joined.item = p.rows_of_item.quotient(number);
  if (joined.item >= p.num_items) return false;
  joined.row = static_cast<int>(number - joined.item * p.rows_of_item.divisor);
  const uint32_t entry_index = p.tiles.items_of_entry.quotient(joined.item);
  const RowTiles::Entry entry = p.tiles.entry(entry_index);
  const RowTiles::Item item = p.tiles.item(joined.item - entry_index * p.tiles.items_of_entry.divisor);
  const attention::Sequence sequence = p.sequence_of(entry.batch);
  if (joined.row >= p.tiles.count(entry, sequence)) return false;
  joined.batch = entry.batch;
  joined.first_column = static_cast<int>(item.slice) * columns;
  joined.at = p.tiles.at(entry.first_row + joined.row, item.head);
  joined.place = head_item(p, sequence, joined.at.head).query_row(joined.at.query);
  return true;
}

// Known before they are there, where the host knows the line; but not whether a NaN came out of a whole item.
__device__ __forceinline__ ItemParts known_parts(const CombineParams& p, uint32_t item) {
  const uint32_t tiles = p.known.tiles_of_item.divisor;
  if (p.known.present()) return p.known.shares.parts(item * tiles, (item + 1) * tiles);
  const auto first_slot = static_cast<int>(item) * p.parts_of_item;
  return {first_slot, first_slot + 1, p.parts_of_item};
}

// A row's parts, or where a block shares them those of a warp, merged. Rows are on their way while the states of all
// parts are merged. What does not exist has the weight 0.
template <class Merged, int kWarpsPerRow>
__device__ __forceinline__ Merged merge_parts(const CombineParams& p, const ItemParts& parts, int row) {
  constexpr int kAhead = kWarpsPerRow == 1 ? 4 : sm80::parts_at_once(kWarpSize * Merged::kSlots);
  const int warp = kWarpsPerRow == 1 ? 0 : tile::warp();
  typename Merged::Columns ahead[kAhead];
  const float* first = p.parts.out_row(parts.slot(warp, p.slot_step), row);
  const float* others = p.parts.out_row(parts.slot(warp + kWarpsPerRow, p.slot_step), row);
  const int64_t step = int64_t{kWarpsPerRow} * p.slot_step * p.parts.rows * p.parts.columns;
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    ahead[i] = {};
    if (warp + i * kWarpsPerRow < parts.count) ahead[i] = Merged::load(i == 0 ? first : others + (i - 1) * step);
  }
  RowStates states = {p.parts, parts, p.slot_step, row};
  states.load();
  Merged merged;
  merged.state = states.all;
  static_assert(kAhead * kWarpsPerRow <= RowStates::kKnown * kWarpSize && kWarpSize % kWarpsPerRow == 0);
  constexpr int kOfFirst = kWarpSize / kWarpsPerRow;  // of these, whose weights are the first that lanes keep
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    const int part = warp + i * kWarpsPerRow;
    merged.add_weighted(ahead[i], i < kOfFirst ? states.known_weight<0>(part) : states.known_weight<1>(part));
  }
#pragma unroll 1
  for (int part = warp + kAhead * kWarpsPerRow; part < parts.count; part += kWarpsPerRow) {
    merged.add_weighted(Merged::load(p.parts.out_row(parts.slot(part, p.slot_step), row)), states.weight(part));
  }
  return merged;
}

constexpr int threads_of(int warps_per_row) {
  return kWarpSize * (warps_per_row == 1 ? kRowsOfJoiningBlock : warps_per_row);
}
// Of a multiprocessor, as many as registers allow without spills.
constexpr int blocks_of(int columns, int warps_per_row) {
  return warps_per_row > 1 ? 24 / warps_per_row : columns > 128 ? 6 : 8;
}

template <class Element, int kColumns, int kWarpsPerRow>
__global__ void __launch_bounds__(threads_of(kWarpsPerRow), blocks_of(kColumns, kWarpsPerRow))
    combine_kernel(const __grid_constant__ CombineParams p) {
  using Merged = MergedRow<kColumns>;
  constexpr bool kShares = kWarpsPerRow > 1;
  __shared__ __align__(16) float warp_out[kWarpsPerRow][kColumns];
  JoinedRow joined;
  if (!find_row(joined, p, kShares ? blockIdx.x : blockIdx.x * kRowsOfJoiningBlock + tile::warp(), kColumns)) return;
  const ItemParts known = known_parts(p, joined.item);
  const ColumnRange columns = {joined.first_column, joined.first_column + kColumns};
  bool has_nan = false;
#pragma unroll 1
  for (int turn = ptx::kLaunchesEarly && p.rehearses ? 0 : 1; turn < 2; ++turn) {
    const bool rehearsal = turn == 0;
    ItemParts parts = {};
    if (!rehearsal) {
      ptx::wait_for_kernel_before();
      parts = known;
      if (p.items != nullptr && (!p.known.present() || parts.count == 1)) parts = p.items[joined.item];
      if (parts.count == 1) return;
    }
    Merged merged = merge_parts<Merged, kWarpsPerRow>(p, parts, joined.row);
    if constexpr (kShares) {
      merged.store_columns(warp_out[tile::warp()]);
      __syncthreads();
      if (!rehearsal && tile::warp() != 0) return;
#pragma unroll
      for (int other = 1; other < kWarpsPerRow; ++other) merged.add_weighted(Merged::load(warp_out[other]), 1.0f);
    }
    has_nan = !rehearsal && parts.count == ItemParts::kHasNan
                  ? holds_nan<Element>(p, joined.place, columns)
                  : finish_row<Element>(p, joined.place, merged, joined.first_column, !rehearsal);
    if (kShares && rehearsal) __syncthreads();  // nobody reads what the warps left any more
  }
  if (has_nan) repair_row<Element>(p, joined.batch, joined.at, columns);
}

}  // namespace

template <class Element, int kColumns>
cudaError_t combine(const CombineParams& params, cudaStream_t stream) {
  const int64_t rows = int64_t{params.num_items} * params.rows_of_item.divisor;
  const auto launch = [&](auto warps_per_row) {
    constexpr int kWarpsPerRow = warps_per_row();
    constexpr int kRows = kWarpsPerRow == 1 ? kRowsOfJoiningBlock : 1;
    const int64_t blocks = (rows + kRows - 1) / kRows;
    if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
    return launch_early(combine_kernel<Element, kColumns, kWarpsPerRow>,
                        {.blocks = blocks, .threads = threads_of(kWarpsPerRow)}, stream, params);
  };
  switch (params.warps_per_row) {
    case 1:
      return launch(std::integral_constant<int, 1>{});
    case kFewJoiningWarps:
      return launch(std::integral_constant<int, kFewJoiningWarps>{});
    case kJoiningWarps:
      return launch(std::integral_constant<int, kJoiningWarps>{});
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
