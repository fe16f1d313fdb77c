// Gradients of tables, in a fixed order and without atomics.
//
// Grid: one CTA for each (range of entries, row, split of the columns). A warp goes through consecutive columns, 32 at
// a time, and adds them to sums of its own in shared memory. Lanes that have the same entry add one after the other. At
// the end the CTA adds the sums of its warps, and a second kernel those of the splits. Bound: latency; a table is
// small.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "attention/division.h"
#include "kernels/common/sums/sums.h"
#include "tile/accumulator.h"

namespace flash_attn_ext::common {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * tile::kWarpSize;
constexpr int kRange = 1024;  // entries of a CTA

template <class Element>
using Sum = std::conditional_t<std::is_same_v<Element, double>, double, float>;

// Adds a value of each lane to the sum of its entry; -1 for none. If lanes have few entries, the warp sums the values
// of one entry after the other. Otherwise lanes with the same entry add in order.
template <class Real>
__device__ __forceinline__ void add_columns(Real* sums, int entry, Real value) {
  constexpr unsigned kAll = 0xFFFFFFFFu;
  const unsigned equal = __match_any_sync(kAll, entry);
  const int before = entry < 0 ? -1 : __popc(equal & ((1u << tile::lane()) - 1));
  unsigned first_lanes = __ballot_sync(kAll, before == 0);
  constexpr int kFew = 4;
  if (__popc(first_lanes) <= kFew) {
    for (; first_lanes != 0; first_lanes &= first_lanes - 1) {
      const int of = __shfl_sync(kAll, entry, __ffs(static_cast<int>(first_lanes)) - 1);
      const Real sum = tile::sum_over_lanes<tile::kWarpSize>(entry == of ? value : Real(0));
      if (tile::lane() == 0) sums[of] += sum;
    }
    __syncwarp();
    return;
  }
  for (int rank = 0; __any_sync(kAll, before >= rank); ++rank) {
    if (before == rank) sums[entry] += value;
    __syncwarp();
  }
}

template <class Element>
__global__ void __launch_bounds__(kThreads) table_sums_kernel(const __grid_constant__ TableSums t, int num_splits) {
  using Real = Sum<Element>;
  __shared__ Real sums[kWarps][kRange];
  const int64_t split = blockIdx.x % num_splits;
  const int64_t row = blockIdx.x / num_splits % t.rows;
  const int64_t first_entry = blockIdx.x / num_splits / t.rows * kRange;
  Real* const own = sums[tile::warp()];
  for (int i = tile::lane(); i < kRange; i += tile::kWarpSize) own[i] = Real(0);
  __syncwarp();
  const int64_t share = attention::ceil_div(t.columns, int64_t{num_splits} * kWarps);
  const int64_t begin = (split * kWarps + tile::warp()) * share;
  const int64_t end = min(begin + share, t.columns);
  const auto* values = static_cast<const Element*>(t.values) + row * t.row_stride;
  for (int64_t first = begin; first < end; first += tile::kWarpSize) {
    const int64_t column = first + tile::lane();
    int entry = -1;
    Real value = Real(0);
    if (column < end) {
      const int64_t clamped = min(max(t.entries[column], 0), static_cast<int>(t.num_entries) - 1) - first_entry;
      if (clamped >= 0 && clamped < kRange) entry = static_cast<int>(clamped);
      value = static_cast<Real>(values[column]);
    }
    add_columns(own, entry, value);
  }
  __syncthreads();
  auto* partial_sums = static_cast<Real*>(t.partial_sums) + (split * t.rows + row) * t.num_entries + first_entry;
  for (int64_t i = threadIdx.x; i < min(int64_t{kRange}, t.num_entries - first_entry); i += kThreads) {
    Real sum = sums[0][i];
    for (int w = 1; w < kWarps; ++w) sum += sums[w][i];
    partial_sums[i] = sum;
  }
}

template <class Real>
__global__ void __launch_bounds__(kThreads) add_splits_kernel(const __grid_constant__ TableSums t, int num_splits) {
  const int64_t size = t.rows * t.num_entries;
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= size) return;
  const auto* partial_sums = static_cast<const Real*>(t.partial_sums);
  Real sum = partial_sums[i];
  for (int64_t split = 1; split < num_splits; ++split) sum += partial_sums[split * size + i];
  switch (t.sums_element) {
    case attention::ElementType::kBFloat16:
      static_cast<__nv_bfloat16*>(t.sums)[i] = __float2bfloat16(static_cast<float>(sum));
      break;
    case attention::ElementType::kFloat16:
      static_cast<__half*>(t.sums)[i] = __float2half(static_cast<float>(sum));
      break;
    case attention::ElementType::kFloat64:
      static_cast<double*>(t.sums)[i] = static_cast<double>(sum);
      break;
    default:
      static_cast<float*>(t.sums)[i] = static_cast<float>(sum);
  }
}

template <class Bits>
__global__ void __launch_bounds__(kThreads) look_up_kernel(const __grid_constant__ TableLookUp t, int blocks_of_row) {
  const int64_t row = blockIdx.x / blocks_of_row;
  const int64_t column = int64_t{blockIdx.x} % blocks_of_row * kThreads + threadIdx.x;
  if (column >= t.columns) return;
  const int entry = min(max(t.entries[column], 0), static_cast<int>(t.num_entries) - 1);
  static_cast<Bits*>(t.to)[row * t.columns + column] =
      static_cast<const Bits*>(t.table)[row * t.row_stride + entry * t.entry_stride];
}

template <class Element>
cudaError_t launch_as(const TableSums& t, cudaStream_t stream) {
  const auto num_splits = static_cast<int>(t.num_splits());
  const int64_t blocks = attention::ceil_div(t.num_entries, int64_t{kRange}) * t.rows * num_splits;
  const int64_t sums = attention::ceil_div(t.rows * t.num_entries, int64_t{kThreads});
  if (blocks > INT32_MAX || sums > INT32_MAX) return cudaErrorInvalidConfiguration;
  table_sums_kernel<Element><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(t, num_splits);
  add_splits_kernel<Sum<Element>><<<static_cast<unsigned>(sums), kThreads, 0, stream>>>(t, num_splits);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_table_sums(const TableSums& t, cudaStream_t stream) {
  if (t.rows == 0 || t.num_entries == 0) return cudaSuccess;
  switch (t.element) {
    case attention::ElementType::kFloat32:
      return launch_as<float>(t, stream);
    case attention::ElementType::kFloat64:
      return launch_as<double>(t, stream);
    case attention::ElementType::kBFloat16:
      return launch_as<__nv_bfloat16>(t, stream);
    case attention::ElementType::kFloat16:
      return launch_as<__half>(t, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

cudaError_t launch_look_up(const TableLookUp& t, cudaStream_t stream) {
  const int64_t blocks_of_row = attention::ceil_div(t.columns, int64_t{kThreads});
  const int64_t blocks = blocks_of_row * t.rows;
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  const auto kernel = t.element_bytes == 2   ? look_up_kernel<uint16_t>
                      : t.element_bytes == 4 ? look_up_kernel<uint32_t>
                                             : look_up_kernel<uint64_t>;
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(t, static_cast<int>(blocks_of_row));
  return cudaGetLastError();
}

}  // namespace flash_attn_ext::common
