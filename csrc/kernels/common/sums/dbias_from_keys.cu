// Grid: one CTA for each 32 keys of each head and batch entry that the bias distinguishes. Neighbouring lanes have
// neighbouring keys. Each warp adds every kWarps-th row in order; then the first one adds the sums of warps. Bound:
// memory where heads or batch entries share the bias, elsewhere the latency of the launch.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "attention/division.h"
#include "kernels/common/launch/launch_early.cuh"
#include "kernels/common/rows/pair_score.cuh"
#include "kernels/common/sums/sums.h"
#include "ptx/dependent_launch.h"

namespace flash_attn_ext::common {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpSize;

// What an element of the gradient sums over.
struct Owner {
  attention::Interval batches;
  attention::Interval heads;

  __device__ __forceinline__ Owner(const attention::BackwardParams& p, int64_t index) {
    const int64_t heads_of_result = p.dbias.per_head ? p.num_heads_q : 1;
    const int64_t batch = index / heads_of_result;
    const int64_t head = index - batch * heads_of_result;
    batches = p.dbias.per_batch ? attention::Interval{batch, batch + 1} : attention::Interval{0, p.batch};
    heads = p.dbias.per_head ? attention::Interval{head, head + 1} : attention::Interval{0, p.num_heads_q};
  }
};

// The sum of every kWarps-th row of partial sums, from the own warp's on.
__device__ __forceinline__ float sum_rows(const attention::BackwardParams& p, const DscoreSumsOfKeys& sums,
                                          const Owner& owner, int64_t key) {
  const int64_t first = owner.heads.begin * sums.rows / p.num_heads_q;
  const int64_t of_batch = owner.heads.end * sums.rows / p.num_heads_q - first;
  const int64_t count = (owner.batches.end - owner.batches.begin) * of_batch;
  float sum = 0.0f;
#pragma unroll 4
  for (int64_t i = tile::warp(); i < count; i += kWarps) {
    const int64_t batch = i / of_batch;
    const int64_t row = (owner.batches.begin + batch) * sums.rows + first + i - batch * of_batch;
    sum += sums.data[row * sums.keys_of_row + key];
  }
  return sum;
}

template <class Element>
__device__ __forceinline__ float sum_pairs(const attention::BackwardParams& p, const Owner& owner, int64_t key) {
  float sum = 0.0f;
#pragma unroll 1
  for (int64_t batch = owner.batches.begin; batch < owner.batches.end; ++batch) {
    const attention::Sequence sequence = p.sequences.at(batch);
    const attention::Interval queries = p.visibility.queries_of(key, sequence);
#pragma unroll 1
    for (int64_t head = owner.heads.begin; head < owner.heads.end; ++head) {
      const HeadRows coord = {sequence, head, head / p.queries_per_key_head()};
#pragma unroll 1
      for (int64_t first = queries.begin; first < queries.end; first += kWarpSize) {
        sum += sum_over_warp(gradients_of_key<Element>(p, coord, first, key).dscore);
      }
    }
  }
  return sum;
}

template <class Element>
__global__ void __launch_bounds__(kThreads)
    dbias_from_keys_kernel(const __grid_constant__ attention::BackwardParams p,
                           const __grid_constant__ DscoreSumsOfKeys sums, int64_t blocks_of_row) {
  __shared__ float of_warps[kWarps][kWarpSize];
  ptx::wait_for_kernel_before();
  const int64_t index = blockIdx.x / blocks_of_row;
  const int64_t first_key = (blockIdx.x - index * blocks_of_row) * kWarpSize;
  const Owner owner(p, index);
  const int64_t key = first_key + tile::lane();
  const int64_t keys = p.sequences.max_seqlen_k;
  of_warps[tile::warp()][tile::lane()] = key < keys ? sum_rows(p, sums, owner, key) : 0.0f;
  __syncthreads();
  if (tile::warp() != 0) return;
  float sum = 0.0f;
  for (const auto& of_warp : of_warps) sum += of_warp[tile::lane()];
  for (unsigned left = __ballot_sync(kAllLanes, !isfinite(sum)); left != 0; left &= left - 1) {
    const int lane = __ffs(static_cast<int>(left)) - 1;
    const float again = sum_pairs<Element>(p, owner, first_key + lane);
    if (tile::lane() == lane) sum = again;
  }
  if (key >= keys) return;
  const attention::BiasGradient& to = p.dbias;
  const int64_t offset =
      owner.batches.begin * to.batch_stride + owner.heads.begin * to.head_stride + key * to.key_stride;
  if (to.element == attention::ElementType::kFloat32) {
    static_cast<float*>(to.data)[offset] = sum;
  } else {
    static_cast<Element*>(to.data)[offset] = Element(sum);
  }
}

}  // namespace

cudaError_t launch_dbias_from_keys(const attention::BackwardParams& p, const DscoreSumsOfKeys& sums,
                                   cudaStream_t stream) {
  const int64_t blocks_of_row = attention::ceil_div(p.sequences.max_seqlen_k, kWarpSize);
  const int64_t rows = (p.dbias.per_batch ? p.batch : 1) * (p.dbias.per_head ? p.num_heads_q : 1);
  const int64_t blocks = rows * blocks_of_row;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  const auto kernel = p.element == attention::ElementType::kBFloat16 ? dbias_from_keys_kernel<__nv_bfloat16>
                                                                     : dbias_from_keys_kernel<__half>;
  return launch_early(kernel, {.blocks = blocks, .threads = kThreads}, stream, p, sums, blocks_of_row);
}

}  // namespace flash_attn_ext::common
