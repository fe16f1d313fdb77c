// delta[row] = sum over columns of dout * out, minus dlse: the first stage of the backward pass.
//
// Grid: one warp a row, kWarpsPerBlock rows a block, rows numbered (batch, head, row). Lanes stride over the columns
// and the warp adds up in a fixed butterfly order, so the result does not depend on scheduling. Bound: memory. 2 *
// head_dim * element bytes are read and 4 (or 8) written a row.
#include "kernels/common/delta.h"
#include "tile/element.h"

namespace flash_attn_ext::common {
namespace {

constexpr int kWarpSize = 32;
constexpr int kWarpsPerBlock = 8;

template <class Real>
__device__ Real sum_over_warp(Real value) {
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, offset);
  return value;
}

template <class Element>
__global__ void __launch_bounds__(kWarpsPerBlock* kWarpSize) delta_kernel(const attention::DeltaParams p) {
  using Real = tile::Accumulate<Element>;
  const int64_t index = int64_t{blockIdx.x} * kWarpsPerBlock + threadIdx.x / kWarpSize;
  if (index >= p.batch * p.num_heads * p.rows) return;
  const int64_t row = index % p.rows;
  const int64_t head = index / p.rows % p.num_heads;
  const int64_t batch = index / p.rows / p.num_heads;
  const Element* out = p.out.row<const Element>(batch, head, row);
  const Element* dout = p.dout.row<const Element>(batch, head, row);
  const int lane = threadIdx.x % kWarpSize;
  Real sum = Real(0);
  for (int64_t column = lane; column < p.head_dim; column += kWarpSize) {
    sum +=
        static_cast<Real>(out[column * p.out.column_stride]) * static_cast<Real>(dout[column * p.dout.column_stride]);
  }
  sum = sum_over_warp(sum);
  if (lane != 0) return;
  if (p.dlse.present()) sum -= *p.dlse.at<const Real>(batch, head, row);
  *p.delta.at<Real>(batch, head, row) = sum;
}

template <class Element>
cudaError_t launch(const attention::DeltaParams& params, cudaStream_t stream) {
  const int64_t rows = params.batch * params.num_heads * params.rows;
  const int64_t blocks = (rows + kWarpsPerBlock - 1) / kWarpsPerBlock;
  delta_kernel<Element><<<static_cast<unsigned>(blocks), kWarpsPerBlock * kWarpSize, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_delta(const attention::DeltaParams& params, cudaStream_t stream) {
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
