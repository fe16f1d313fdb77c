// delta[row] = sum over columns of dout * out, minus dlse: the first stage of the backward pass.
//
// Grid: a CTA has kRows rows of one head. kLanes neighbouring lanes share a row, 16 bytes each, and add in a fixed
// butterfly order, so the result does not depend on scheduling. A thread has several rows in flight at a time. The
// kernel is memory-bound: per row, it reads 2 * head_dim * element bytes and writes 4 (or 8).
#include "attention/division.h"
#include "kernels/common/launch/launch_early.cuh"
#include "kernels/common/rows/row_products.cuh"
#include "kernels/common/sums/sums.h"
#include "ptx/dependent_launch.h"
#include "tile/accumulator.h"
#include "tile/element.h"

namespace flash_attn_ext::common {
namespace {

using attention::Divisor;

constexpr int kThreads = 128;
constexpr int kRowsInFlight = 4;

struct DeltaGrid {
  Divisor tiles;  // of a head's rows
  Divisor heads;
};

// Whether a head's rows can be read 16 bytes at a time.
template <class Element>
__device__ __forceinline__ bool in_chunks(const attention::MatrixView& view, const Element* head, int64_t head_dim) {
  return view.column_stride == 1 && (head_dim | view.row_stride) % Chunk<Element>::kCount == 0 &&
         reinterpret_cast<uintptr_t>(head) % 16 == 0;
}

template <class Element, int kLanes>
struct DeltaKernel {
  using Real = tile::Accumulate<Element>;
  static constexpr int kRowStep = kThreads / kLanes;
  static constexpr int kRows = kRowsInFlight * kRowStep;

  const attention::DeltaParams& p;
  const Element* out;  // row 0 of the head
  const Element* dout;
  int64_t first_row;  // of the thread

  template <class Chunk>
  __device__ __forceinline__ void sum(Real (&sums)[kRowsInFlight]) const {
    const auto rows = static_cast<int>(min(p.rows - first_row, int64_t{kRows}));
    const int64_t lane = threadIdx.x % kLanes;
    for (int64_t column = lane * Chunk::kCount; column < p.head_dim; column += kLanes * Chunk::kCount) {
      add_products<Chunk>(
          sums,
          {out + first_row * p.out.row_stride + column * p.out.column_stride,
           dout + first_row * p.dout.row_stride + column * p.dout.column_stride, p.out.row_stride, p.dout.row_stride},
          rows, [](int i) { return i * kRowStep; });
    }
  }

  __device__ __forceinline__ void run(int64_t batch, int64_t head) const {
    Real sums[kRowsInFlight] = {};
    if (in_chunks(p.out, out, p.head_dim) && in_chunks(p.dout, dout, p.head_dim)) {
      sum<Chunk<Element>>(sums);
    } else {
      sum<Chunk<Element, 1>>(sums);
    }
#pragma unroll
    for (int i = 0; i < kRowsInFlight; ++i) {
      sums[i] = tile::sum_over_lanes<kLanes>(sums[i]);
      const int64_t row = first_row + i * kRowStep;
      if (row >= p.rows || threadIdx.x % kLanes != 0) continue;
      const Real dlse = p.dlse.present() ? *p.dlse.at<const Real>(batch, head, row) : Real(0);
      *p.delta.at<Real>(batch, head, row) = sums[i] - dlse;
    }
  }
};

template <class Element, int kLanes>
__global__ void __launch_bounds__(kThreads)
    delta_kernel(const __grid_constant__ attention::DeltaParams p, const __grid_constant__ DeltaGrid grid) {
  using Kernel = DeltaKernel<Element, kLanes>;
  ptx::wait_for_kernel_before();
  ptx::allow_dependent_launch();
  const uint32_t index = grid.tiles.quotient(blockIdx.x);
  const uint32_t tile = blockIdx.x - index * grid.tiles.divisor;
  const uint32_t batch = grid.heads.quotient(index);
  const uint32_t head = index - batch * grid.heads.divisor;
  const Kernel kernel = {p, p.out.row<const Element>(batch, head, 0), p.dout.row<const Element>(batch, head, 0),
                         int64_t{tile} * Kernel::kRows + threadIdx.x / kLanes};
  kernel.run(batch, head);
}

template <class Element, int kLanes>
cudaError_t launch(const attention::DeltaParams& params, cudaStream_t stream) {
  constexpr int kRows = DeltaKernel<Element, kLanes>::kRows;
  const int64_t tiles = attention::ceil_div(params.rows, kRows);
  const int64_t blocks = params.batch * params.num_heads * tiles;
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  const DeltaGrid grid = {Divisor::of(static_cast<uint32_t>(tiles)),
                          Divisor::of(static_cast<uint32_t>(params.num_heads))};
  return launch_early(delta_kernel<Element, kLanes>, {.blocks = blocks, .threads = kThreads}, stream, params, grid);
}

// A row has one lane for each of its 16-byte chunks.
template <class Element>
cudaError_t launch_for_head_dim(const attention::DeltaParams& params, cudaStream_t stream) {
  return params.head_dim <= 8 * Chunk<Element>::kCount ? launch<Element, 8>(params, stream)
                                                       : launch<Element, 16>(params, stream);
}

}  // namespace

cudaError_t launch_delta(const attention::DeltaParams& params, cudaStream_t stream) {
  switch (params.element) {
    case attention::ElementType::kFloat32:
      return launch_for_head_dim<float>(params, stream);
    case attention::ElementType::kFloat64:
      return launch_for_head_dim<double>(params, stream);
    case attention::ElementType::kBFloat16:
      return launch_for_head_dim<__nv_bfloat16>(params, stream);
    case attention::ElementType::kFloat16:
      return launch_for_head_dim<__half>(params, stream);
    case attention::ElementType::kBool:
      break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace flash_attn_ext::common
