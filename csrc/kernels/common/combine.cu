// O = sum of exp(m_i - m) O_i / sum of exp(m_i - m) l_i over the parts i of a row, each of other keys (Milakov &
// Gimelshein 2018, section 3.1; Dao et al. 2023, "Flash-Decoding").
//
// Grid: rows of items, each with one warp, or with a whole block where rows have many parts: its warps share them, and
// the first one merges what they leave, in a fixed order. Bound: latency; the parts of a query are some tens of rows.
#include <algorithm>

#include "kernels/common/combine.h"
#include "ptx/dependent_launch.h"

namespace flash_attn_ext::common {
namespace {

constexpr int kWarpsOfRow = 8;   // of a block that joins one row
constexpr int kWarpsOfRows = 4;  // of a block that joins a row in each warp
constexpr int kAhead = 4;        // parts that a warp loads before it knows their weights
constexpr int kThreadsOfRow = kWarpsOfRow * kWarpSize;
constexpr int kThreadsOfRows = kWarpsOfRows * kWarpSize;

// Whether a GPU of compute capability 9.0 or later finds code that waits for the kernel before.
constexpr bool kWaits = std::max({__CUDA_ARCH_LIST__}) >= 900;

// Of all parts of a row, the same in every lane.
__device__ __forceinline__ attention::SoftmaxState<float> merge_states(const CombineParams& p, const ItemParts& parts,
                                                                       int row) {
  attention::SoftmaxState<float> own;
  for (int part = tile::lane(); part < parts.count; part += kWarpSize) {
    const float2 state = p.parts.state_of(parts.slot(part, p.slot_step), row);
    own.merge({.m = state.x, .l = state.y});
  }
  attention::SoftmaxState<float> all = {.m = maximum_over_warp(own.m), .l = 0.0f};
  all.l = sum_over_warp(own.l * exp(own.m - all.shift()));
  return all;
}

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

template <class Element, int kColumns, int kWarpsPerRow>
__global__ void __launch_bounds__(kWarpsPerRow == 1 ? kThreadsOfRows : kThreadsOfRow, kWarpsPerRow == 1 ? 4 : 2)
    combine_kernel(const __grid_constant__ CombineParams p) {
  __shared__ float warp_out[kWarpsPerRow][kColumns];
  const uint32_t number = kWarpsPerRow == 1 ? blockIdx.x * kWarpsOfRows + tile::warp() : blockIdx.x;
  const uint32_t index = p.rows_of_item.quotient(number);
  if (index >= p.num_items) return;
  const auto row = static_cast<int>(number - index * p.rows_of_item.divisor);
  const uint32_t entry_index = p.tiles.items_of_entry.quotient(index);
  const RowTiles::Entry entry = p.tiles.entry(entry_index);
  const RowTiles::Item item = p.tiles.item(index - entry_index * p.tiles.items_of_entry.divisor);
  const attention::Sequence sequence = p.sequence_of(entry.batch);
  if (row >= p.tiles.count(entry, sequence)) return;
  ptx::wait_for_kernel_before();
  const auto first_slot = static_cast<int>(index) * p.parts_of_item;
  const ItemParts parts = p.items != nullptr ? p.items[index] : ItemParts{first_slot, first_slot + 1, p.parts_of_item};
  if (parts.count == 1) return;
  const PackedRow at = p.tiles.at(entry.first_row + row, item.head);
  const HeadItem head = head_item(p, sequence, at.head);
  const RowPlace place = head.query_row(at.query);
  const int first_column = static_cast<int>(item.slice) * kColumns;
  const int warp = kWarpsPerRow == 1 ? 0 : tile::warp();
  // Rows are on their way while the states of all parts are merged.
  float ahead[kAhead][kColumns / kWarpSize];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    const int part = warp + i * kWarpsPerRow;
    const float* out = p.parts.out_row(parts.slot(part < parts.count ? part : 0, p.slot_step), row);
#pragma unroll
    for (int slot = 0; slot < kColumns / kWarpSize; ++slot) ahead[i][slot] = out[MergedRow<kColumns>::column(slot)];
  }
  MergedRow<kColumns> merged;
  merged.state = merge_states(p, parts, row);
  const auto weight = [&](int part) {
    return exp(p.parts.state_of(parts.slot(part, p.slot_step), row).x - merged.state.shift());
  };
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    const int part = warp + i * kWarpsPerRow;
    if (part < parts.count) merged.add_weighted(ahead[i], weight(part));
  }
  for (int part = warp + kAhead * kWarpsPerRow; part < parts.count; part += kWarpsPerRow) {
    merged.load_weighted(p.parts.out_row(parts.slot(part, p.slot_step), row), weight(part));
  }
  if constexpr (kWarpsPerRow > 1) {
#pragma unroll
    for (int slot = 0; slot < merged.kSlots; ++slot) warp_out[warp][merged.column(slot)] = merged.out[slot];
    __syncthreads();
    if (warp != 0) return;
    for (int other = 1; other < min(kWarpsPerRow, parts.count); ++other) merged.load_weighted(warp_out[other], 1.0f);
  }
  const ColumnRange columns = {first_column, first_column + kColumns};
  const bool has_nan = parts.count == ItemParts::kHasNan ? holds_nan<Element>(p, place, columns)
                                                         : finish_row<Element>(p, place, merged, first_column);
  if (has_nan) compute_forward_row<Element, AnyKeys>(p, head, at.query, columns);
}

}  // namespace

template <class Element, int kColumns>
cudaError_t combine(const CombineParams& params, cudaStream_t stream) {
  const int64_t rows = int64_t{params.num_items} * params.rows_of_item.divisor;
  const int64_t blocks = params.block_per_row ? rows : (rows + kWarpsOfRows - 1) / kWarpsOfRows;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  int device = 0;
  int major = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(params.block_per_row ? kThreadsOfRow : kThreadsOfRows);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = kWaits && major >= 9 ? 1 : 0;
  const auto kernel =
      params.block_per_row ? combine_kernel<Element, kColumns, kWarpsOfRow> : combine_kernel<Element, kColumns, 1>;
  return cudaLaunchKernelEx(&config, kernel, params);
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
