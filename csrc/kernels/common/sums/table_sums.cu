// Gradients of tables, in a fixed order and without atomics.
//
// Grid: one CTA for each (range of entries, row, part of the columns). A warp goes through consecutive columns, 32 at a
// time, and adds them to sums of its own in shared memory. Lanes that have the same entry add one after the other. At
// the end the CTA adds the sums of its warps, and a second kernel those of the parts. Bound: latency; a table is small.
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

template <class Element>
__global__ void __launch_bounds__(kThreads) table_sums_kernel(const __grid_constant__ TableSums t, int num_parts) {
  using Real = Sum<Element>;
  __shared__ Real sums[kWarps][kRange];
  const int64_t part = blockIdx.x % num_parts;
  const int64_t row = blockIdx.x / num_parts % t.rows;
  const int64_t first_entry = blockIdx.x / num_parts / t.rows * kRange;
  Real* const own = sums[tile::warp()];
  for (int i = tile::lane(); i < kRange; i += tile::kWarpSize) own[i] = Real(0);
  __syncwarp();
  const int64_t share = attention::ceil_div(t.columns, int64_t{num_parts} * kWarps);
  const int64_t begin = (part * kWarps + tile::warp()) * share;
  const int64_t end = min(begin + share, t.columns);
  const auto* values = static_cast<const Element*>(t.values) + row * t.row_stride;
  for (int64_t first = begin; first < end; first += tile::kWarpSize) {
    const int64_t column = first + tile::lane();
    int64_t entry = -1;
    Real value = Real(0);
    if (column < end) {
      entry = t.entries[column] - first_entry;
      value = static_cast<Real>(values[column]);
    }
    const bool counts = entry >= 0 && entry < kRange;
    const unsigned equal = __match_any_sync(0xFFFFFFFFu, counts ? static_cast<int>(entry) : -1);
    const int before = counts ? __popc(equal & ((1u << tile::lane()) - 1)) : -1;
    for (int rank = 0; __any_sync(0xFFFFFFFFu, before >= rank); ++rank) {
      if (before == rank) own[entry] += value;
      __syncwarp();
    }
  }
  __syncthreads();
  auto* parts = static_cast<Real*>(t.parts) + (part * t.rows + row) * t.num_entries + first_entry;
  for (int64_t i = threadIdx.x; i < min(int64_t{kRange}, t.num_entries - first_entry); i += kThreads) {
    Real sum = sums[0][i];
    for (int w = 1; w < kWarps; ++w) sum += sums[w][i];
    parts[i] = sum;
  }
}

template <class Real>
__global__ void __launch_bounds__(kThreads) add_parts_kernel(const __grid_constant__ TableSums t, int num_parts) {
  const int64_t size = t.rows * t.num_entries;
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= size) return;
  const auto* parts = static_cast<const Real*>(t.parts);
  Real sum = parts[i];
  for (int64_t part = 1; part < num_parts; ++part) sum += parts[part * size + i];
  static_cast<Real*>(t.sums)[i] = sum;
}

template <class Element>
cudaError_t launch_as(const TableSums& t, cudaStream_t stream) {
  const auto num_parts = static_cast<int>(t.num_parts());
  const int64_t blocks = attention::ceil_div(t.num_entries, int64_t{kRange}) * t.rows * num_parts;
  const int64_t sums = attention::ceil_div(t.rows * t.num_entries, int64_t{kThreads});
  if (blocks > INT32_MAX || sums > INT32_MAX) return cudaErrorInvalidConfiguration;
  table_sums_kernel<Element><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(t, num_parts);
  add_parts_kernel<Sum<Element>><<<static_cast<unsigned>(sums), kThreads, 0, stream>>>(t, num_parts);
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

}  // namespace flash_attn_ext::common
