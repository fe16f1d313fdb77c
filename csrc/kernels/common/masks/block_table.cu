// Makes the table of blocks of lists of blocks.
//
// Grid: one CTA for each list, which clears its row of the table and then sets what is listed. Bound: latency.
#include "kernels/common/masks/mask_tiles.h"

namespace flash_attn_ext::common {
namespace {

constexpr int kThreads = 128;

template <class Index>
__global__ void __launch_bounds__(kThreads) block_table_kernel(const __grid_constant__ BlockTable t) {
  bool* const row = t.table + int64_t{blockIdx.x} * t.width;
  const Index* const indices = static_cast<const Index*>(t.indices) + int64_t{blockIdx.x} * t.most;
  const int64_t count = min(static_cast<int64_t>(static_cast<const Index*>(t.counts)[blockIdx.x]), t.most);
  for (int64_t i = threadIdx.x; i < t.width; i += kThreads) row[i] = false;
  __syncthreads();
  for (int64_t i = threadIdx.x; i < count; i += kThreads) {
    const auto block = static_cast<int64_t>(indices[i]);
    if (block >= 0 && block < t.width) row[block] = true;
  }
}

}  // namespace

cudaError_t launch_block_table(const BlockTable& t, cudaStream_t stream) {
  if (t.rows == 0 || t.width == 0) return cudaSuccess;
  if (t.rows > INT32_MAX) return cudaErrorInvalidConfiguration;
  const auto blocks = static_cast<unsigned>(t.rows);
  if (t.in_64_bits) {
    block_table_kernel<int64_t><<<blocks, kThreads, 0, stream>>>(t);
  } else {
    block_table_kernel<int32_t><<<blocks, kThreads, 0, stream>>>(t);
  }
  return cudaGetLastError();
}

}  // namespace flash_attn_ext::common
