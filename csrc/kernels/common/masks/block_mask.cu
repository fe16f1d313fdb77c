// Makes the block mask of lists of blocks.
//
// Grid: one CTA for each list, which clears its row of the mask and then sets what is listed. Bound: latency.
#include "kernels/common/masks/mask_tiles.h"

namespace flash_attn_ext::common {
namespace {

constexpr int kThreads = 128;

template <class Index>
__global__ void __launch_bounds__(kThreads) block_mask_kernel(const __grid_constant__ BlockMaskOfLists m) {
  bool* const row = m.mask + int64_t{blockIdx.x} * m.width;
  const Index* const indices = static_cast<const Index*>(m.indices) + int64_t{blockIdx.x} * m.most;
  const int64_t count = min(static_cast<int64_t>(static_cast<const Index*>(m.counts)[blockIdx.x]), m.most);
  for (int64_t i = threadIdx.x; i < m.width; i += kThreads) row[i] = false;
  __syncthreads();
  for (int64_t i = threadIdx.x; i < count; i += kThreads) {
    const auto block = static_cast<int64_t>(indices[i]);
    if (block >= 0 && block < m.width) row[block] = true;
  }
}

}  // namespace

cudaError_t launch_block_mask(const BlockMaskOfLists& m, cudaStream_t stream) {
  if (m.rows == 0 || m.width == 0) return cudaSuccess;
  if (m.rows > INT32_MAX) return cudaErrorInvalidConfiguration;
  const auto blocks = static_cast<unsigned>(m.rows);
  if (m.in_64_bits) {
    block_mask_kernel<int64_t><<<blocks, kThreads, 0, stream>>>(m);
  } else {
    block_mask_kernel<int32_t><<<blocks, kThreads, 0, stream>>>(m);
  }
  return cudaGetLastError();
}

}  // namespace flash_attn_ext::common
