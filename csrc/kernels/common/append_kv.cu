// Grid: kRowsPerBlock rows per block, a warp each: first those of k_new, then of v_new, then of q. Bound: memory, and
// for a step of decoding the latency of a launch.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/common/append_kv.h"
#include "tile/accumulator.h"
#include "tile/element.h"

namespace flash_attn_ext::common {
namespace {

using attention::AppendParams;
using attention::MatrixView;

constexpr int kRowsPerBlock = 4;
constexpr int kThreads = kRowsPerBlock * tile::kWarpSize;

// A row on its way: `columns` elements.
template <class Element>
struct RowCopy {
  const Element* source;
  int64_t source_stride;
  Element* target;
  int64_t target_stride;
  int64_t columns;

  __device__ __forceinline__ const Element& from(int64_t column) const { return source[column * source_stride]; }
  __device__ __forceinline__ Element& to(int64_t column) const { return target[column * target_stride]; }
};

template <class Element>
__device__ __forceinline__ void copy_row(const RowCopy<Element>& row, int64_t first_column) {
  for (int64_t column = first_column + tile::lane(); column < row.columns; column += tile::kWarpSize) {
    row.to(column) = row.from(column);
  }
}

template <class Element>
__device__ __forceinline__ void rotate_row(const RowCopy<Element>& row, const attention::Rotary& rotary,
                                           int64_t position) {
  using Real = tile::Accumulate<Element>;
  const Element* cos = static_cast<const Element*>(rotary.cos) + rotary.row(position) * rotary.cos_stride;
  const Element* sin = static_cast<const Element*>(rotary.sin) + rotary.row(position) * rotary.sin_stride;
  for (int64_t pair = tile::lane(); pair < rotary.dim / 2; pair += tile::kWarpSize) {
    const int64_t first = rotary.first_column(pair);
    const int64_t second = rotary.second_column(pair);
    const attention::RotatedPair<Real> rotated =
        attention::rotate(static_cast<Real>(row.from(first)), static_cast<Real>(row.from(second)),
                          static_cast<Real>(cos[pair]), static_cast<Real>(sin[pair]));
    row.to(first) = Element(rotated.first);
    row.to(second) = Element(rotated.second);
  }
  copy_row(row, rotary.dim);
}

template <class Element>
struct AppendKernel {
  const AppendParams& p;

  // index: of (batch, new key, head).
  __device__ __forceinline__ void append(const MatrixView& source, const MatrixView& target, int64_t index,
                                         int64_t columns, bool rotates) const {
    const int64_t head = index % p.num_heads_k;
    const int64_t number = index / p.num_heads_k % p.cache.num_new;
    const int64_t batch = index / p.num_heads_k / p.cache.num_new;
    const int64_t key = p.cache.num_old(batch, p.capacity) + number;
    if (key >= p.capacity) return;
    const attention::KeyRow at = p.cache.row(batch, key);
    const RowCopy<Element> row = {source.row<const Element>(batch, head, number), source.column_stride,
                                  target.row<Element>(at.entry, head, at.row), target.column_stride, columns};
    if (rotates) {
      rotate_row(row, p.rotary, key);
    } else {
      copy_row(row, 0);
    }
  }

  __device__ __forceinline__ void rotate_query(int64_t index) const {
    const int64_t head = index % p.num_heads_q;
    const int64_t query = index / p.num_heads_q % p.num_queries;
    const int64_t batch = index / p.num_heads_q / p.num_queries;
    const RowCopy<Element> row = {p.q.row<const Element>(batch, head, query), p.q.column_stride,
                                  p.q_rotated.row<Element>(batch, head, query), p.q_rotated.column_stride,
                                  p.head_dim_qk};
    rotate_row(row, p.rotary, p.cache.num_old(batch, p.capacity) + (p.rotary.queries_advance ? query : 0));
  }
};

template <class Element>
__global__ void __launch_bounds__(kThreads) append_kernel(const __grid_constant__ AppendParams p) {
  const AppendKernel<Element> kernel = {p};
  const int64_t new_rows = p.batch * p.cache.num_new * p.num_heads_k;
  const int64_t index = int64_t{blockIdx.x} * kRowsPerBlock + tile::warp();
  if (index < new_rows) {
    kernel.append(p.k_new, p.k, index, p.head_dim_qk, p.rotary.present());
  } else if (index < 2 * new_rows) {
    kernel.append(p.v_new, p.v, index - new_rows, p.head_dim_v, false);
  } else if (p.rotary.present() && index - 2 * new_rows < p.batch * p.num_queries * p.num_heads_q) {
    kernel.rotate_query(index - 2 * new_rows);
  }
}

template <class Element>
cudaError_t launch(const AppendParams& p, cudaStream_t stream) {
  const int64_t queries = p.rotary.present() ? p.batch * p.num_queries * p.num_heads_q : 0;
  const int64_t rows = 2 * p.batch * p.cache.num_new * p.num_heads_k + queries;
  const int64_t blocks = (rows + kRowsPerBlock - 1) / kRowsPerBlock;
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  append_kernel<Element><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

cudaError_t append_kv(const AppendParams& params, cudaStream_t stream) {
  switch (params.element) {
    case attention::ElementType::kFloat32:
      return launch<float>(params, stream);
    case attention::ElementType::kFloat64:
      return launch<double>(params, stream);
    case attention::ElementType::kBFloat16:
      return launch<__nv_bfloat16>(params, stream);
    case attention::ElementType::kFloat16:
      return launch<__half>(params, stream);
    case attention::ElementType::kBool:
      break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace flash_attn_ext::common
