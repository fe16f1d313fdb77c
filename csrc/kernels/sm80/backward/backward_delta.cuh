// delta = rowsum(P dP) - dlse, recomputed: what it is before O is rounded to the element type.
//
// Gradients that are sums of dS over rows (of a bias, ALiBi slopes, a sink) cancel; what a rounded O leaves in delta
// does not. Grid: one block a (batch, query head, tile of queries), each the only one to write its rows.
#pragma once

#include "kernels/sm80/backward/dscore_tile.cuh"

namespace flash_attn_ext::sm80 {

template <class Element, int kHeadDim>
struct BackwardDeltaKernel {
  using Tile = DscoreTile<Element, kHeadDim, Dscore::kWithoutDelta>;
  using Scores = typename Tile::Scores;
  using Shared = typename Tile::Shared;
  static constexpr QueryStationaryTile kTile = Tile::kTile;
  static constexpr int kThreads = Tile::kThreads;

  const BackwardParams& p;
  Shared& shared;

  __device__ __forceinline__ void run(const WorkItem& item, int64_t tile) {
    const int64_t first_query = tile * kTile.queries;
    float sums[Scores::kThreadRows] = {};
    Tile{p, shared}.walk(
        item, {first_query, first_query + kTile.queries}, {0, item.sequence.num_keys},
        [&](const Scores& dscore, const auto&) {
          for_each_element<Scores>([&](int r, int, int j, int e, int) { sums[r] += dscore.at(r, j, e); });
        });
#pragma unroll
    for (int r = 0; r < Scores::kThreadRows; ++r) {
      const float sum = tile::quad_sum(sums[r]);
      const int64_t query = first_query + tile::warp() * Tile::kRowsPerWarp + Scores::row(r);
      if (query >= item.sequence.num_queries || tile::lane() % 4 != 0) continue;
      const int64_t row = item.sequence.query_begin + query;
      const float dlse = p.dlse.present() ? *p.dlse.at<const float>(item.sequence.batch, item.head, row) : 0.0f;
      *p.delta.at<float>(item.sequence.batch, item.head, row) = sum - dlse;
    }
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads) backward_delta_kernel(const __grid_constant__ BackwardParams p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const int64_t tiles = num_tiles(p.sequences.max_seqlen_q, Kernel::kTile.queries);
  const int64_t head_index = blockIdx.x / tiles;
  const int64_t head = head_index % p.num_heads_q;
  const WorkItem item = {p.sequences.at(head_index / p.num_heads_q), head, head / p.queries_per_key_head()};
  Kernel kernel = {p, *reinterpret_cast<typename Kernel::Shared*>(shared_memory)};
  kernel.run(item, blockIdx.x % tiles);
}

}  // namespace flash_attn_ext::sm80
