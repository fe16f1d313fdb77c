// The ALiBi slopes' gradient: dS times d score / d slope, summed over a head.
//
// Grid: one block a (batch, query head, tile of queries), which writes one partial sum; a second kernel adds a head's
// partial sums in order (kernels/common/score_gradients.cu).
#pragma once

#include "kernels/sm80/backward/dscore_tile.cuh"

namespace flash_attn_ext::sm80 {

template <class Element, int kHeadDim>
struct BackwardDalibiKernel {
  using Tile = DscoreTile<Element, kHeadDim, Dscore::kWhole>;
  using Scores = typename Tile::Scores;
  static constexpr QueryStationaryTile kTile = Tile::kTile;
  static constexpr int kThreads = Tile::kThreads;

  struct Shared {
    typename Tile::Shared operands;
    float sums[kTile.warps];
  };

  const BackwardParams& p;
  Shared& shared;

  __device__ __forceinline__ void run(const WorkItem& item, int64_t tile) {
    const int64_t first_query = tile * kTile.queries;
    const int64_t diagonal = p.visibility.diagonal(item.sequence);
    float sum = 0.0f;
    Tile{p, shared.operands}.walk(item, {first_query, first_query + kTile.queries}, {0, item.sequence.num_keys},
                                  [&](const Scores& dscore, const auto& where) {
                                    for_each_element<Scores>([&](int r, int row, int j, int e, int column) {
                                      sum += dscore.at(r, j, e) *
                                             static_cast<float>(attention::alibi_derivative(
                                                 where.query(row, column), where.key(row, column), diagonal));
                                    });
                                  });
    // Lanes in a fixed butterfly, then warps in order.
#pragma unroll
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, offset);
    if (tile::lane() == 0) shared.sums[tile::warp()] = sum;
    __syncthreads();
    if (threadIdx.x != 0) return;
    sum = 0.0f;
    for (int w = 0; w < kTile.warps; ++w) sum += shared.sums[w];
    const int64_t head_index = item.sequence.batch * p.num_heads_q + item.head;
    static_cast<float*>(p.alibi_partials.data)[head_index * p.alibi_partials.per_head + tile] = sum;
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads) backward_dalibi_kernel(const __grid_constant__ BackwardParams p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const int64_t head_index = blockIdx.x / p.alibi_partials.per_head;
  const int64_t head = head_index % p.num_heads_q;
  const WorkItem item = {p.sequences.at(head_index / p.num_heads_q), head, head / p.queries_per_key_head()};
  Kernel kernel = {p, *reinterpret_cast<typename Kernel::Shared*>(shared_memory)};
  kernel.run(item, blockIdx.x % p.alibi_partials.per_head);
}

}  // namespace flash_attn_ext::sm80
