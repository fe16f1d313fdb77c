// Maps CTAs to block diagonals (schedule/block_diagonals.h), and adds the two block diagonals and all splits of each
// diagonal into dBias.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/division.h"
#include "kernels/epilogue/store_dbias.cuh"
#include "kernels/schedule/block_diagonals.h"

namespace flash_attn_ext::sm80 {

// A CTA computes the sums of one block diagonal, over one split of the batch entries.
struct BlockDiagonalWork {
  int split;
  int head;   // of the bias
  int index;  // of the block diagonal

  // The place of this CTA's sums among those of all CTAs.
  __device__ __forceinline__ int64_t place_of_sums(const BlockDiagonals& blocks) const {
    return (int64_t{split} * blocks.heads + head) * blocks.count() + index;
  }
};
// In the order of CTAs the head is fastest, then the split, then the block diagonal.
__device__ __forceinline__ BlockDiagonalWork block_diagonal_work(const BlockDiagonals& blocks, int cta) {
  const int ctas = blocks.splits * blocks.heads;
  const int rest = cta % ctas;
  return {rest / blocks.heads, rest % blocks.heads, blocks.at_rank(cta / ctas)};
}

// The parameters of a kernel that sums dS along block diagonals. Base has the parameters of the kernel that computes
// dS; its `p` is the call.
template <class Base>
struct WithBlockDiagonals : Base {
  BlockDiagonals blocks;
  float* diagonal_sums;  // of each CTA, in the order of BlockDiagonalWork::place_of_sums()
};

struct BlockDiagonalSums {
  attention::BackwardParams p;
  BlockDiagonals blocks;
  float* diagonal_sums;
};

inline constexpr int kCombineThreads = 128;

// One thread for each diagonal of a head of the bias.
template <class Element>
__global__ void __launch_bounds__(kCombineThreads)
    combine_block_diagonals_kernel(const __grid_constant__ BlockDiagonalSums params) {
  const BlockDiagonals& blocks = params.blocks;
  const attention::SequenceTable& lengths = params.p.sequences;
  const int64_t diagonals = lengths.max_seqlen_q + lengths.max_seqlen_k - 1;
  const int64_t index = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t head = index / diagonals;
  if (head >= blocks.heads) return;
  const int64_t from_zero = index % diagonals + (blocks.query_blocks * int64_t{blocks.tile} - lengths.max_seqlen_q);
  // Distance from the main diagonal of block diagonal 0, which is the diagonal tile - 1 of its blocks. The quotient by
  // `tile` is the lower of the two block diagonals that have this diagonal, and the remainder is the distance from the
  // main diagonal of that one. Before the main diagonal of block diagonal 0 there is only the higher one.
  const int64_t place = from_zero + 1 - blocks.tile;
  const int64_t lower = place >= 0 ? place / blocks.tile : -1;
  const int64_t within = place - lower * blocks.tile;
  float sum = 0.0f;
  for (int split = 0; split < blocks.splits; ++split) {
    const float* of_head =
        params.diagonal_sums + (int64_t{split} * blocks.heads + head) * blocks.count() * blocks.sums_of_cta();
    if (lower >= 0) sum += of_head[lower * blocks.sums_of_cta() + within + blocks.tile - 1];
    if (lower + 1 < blocks.count() && within > 0) sum += of_head[(lower + 1) * blocks.sums_of_cta() + within - 1];
  }
  const attention::BiasGradient& g = params.p.dbias;
  const int64_t diagonal = index % diagonals - (lengths.max_seqlen_q - 1);
  store_dbias<Element>(g, head * g.head_stride + diagonal * g.key_stride, sum);
}

template <class Element, class Base>
cudaError_t combine_block_diagonals(const WithBlockDiagonals<Base>& params, cudaStream_t stream) {
  const BlockDiagonalSums sums = {params.p, params.blocks, params.diagonal_sums};
  const int64_t diagonals = sums.p.sequences.max_seqlen_q + sums.p.sequences.max_seqlen_k - 1;
  const int64_t ctas = attention::ceil_div(sums.blocks.heads * diagonals, int64_t{kCombineThreads});
  combine_block_diagonals_kernel<Element><<<static_cast<unsigned>(ctas), kCombineThreads, 0, stream>>>(sums);
  return cudaGetLastError();
}

}  // namespace flash_attn_ext::sm80
