// Computes the gradient of a relative-position bias: recomputes dS and sums it along diagonals.
//
// Grid: one CTA for each BlockDiagonalWork. All blocks of a block diagonal have the same diagonals
// (schedule/block_diagonals.h). So the sums of dS over these blocks, and over the batch entries of a split, stay in
// registers, one for each element of a block. At the end the CTA sums these along diagonals, one thread for each, and
// stores them. A second kernel adds the splits, and the two block diagonals that have a diagonal, in order. Shared
// memory is that of dscore_sums.cuh.
#pragma once

#include "kernels/sm80/backward/combine_block_diagonals.cuh"
#include "kernels/sm80/backward/dscore_sums.cuh"

namespace flash_attn_ext::sm80 {

// The parameters that WithBlockDiagonals adds to.
struct RecomputingParams {
  BackwardParams p;
};
using RelativeDbiasParams = WithBlockDiagonals<RecomputingParams>;

template <class Element, int kHeadDim>
struct RelativeDbiasKernel : DscoreTileSums<Element, kHeadDim> {
  using Base = DscoreTileSums<Element, kHeadDim>;
  using Base::kRowsPerWarp;
  using Base::kThreads;
  using Base::kTile;
  using Base::p;
  using Base::shared;
  using Base::sums;
  using typename Base::Shared;

  static constexpr int kBlock = kTile.queries;
  static constexpr int kKeyTiles = kBlock / kTile.keys;
  static_assert(kTile.queries % kTile.keys == 0 && kThreads == 2 * kBlock);

  __device__ __forceinline__ RelativeDbiasKernel(const BackwardParams& params, Shared& memory) : Base(params, memory) {}

  // Returns the thread's sum: of the diagonal key - query = threadIdx.x - (kBlock - 1) from the offset of the block
  // diagonal.
  __device__ __forceinline__ float run(const BlockDiagonals& blocks, const BlockDiagonalWork& work) {
    const bool per_head = p.dbias.per_head;
    const int64_t entries = p.batch * (per_head ? 1 : p.num_heads_q);
    float own = 0.0f;
    for (int key_tile = 0; key_tile < kKeyTiles; ++key_tile) {
      sums.clear();
      for (int64_t entry = work.split; entry < entries; entry += blocks.splits) {
        const attention::Sequence sequence = p.sequences.at(entry % p.batch);
        const int64_t head = per_head ? work.head : entry / p.batch;
        const HeadCoord coord = {sequence, head, head / p.queries_per_key_head()};
        for (int block = blocks.first_block(work.index); block < blocks.end_block(work.index); ++block) {
          const int64_t query = int64_t{block} * kBlock;
          const int64_t key = query + blocks.offset(work.index) + key_tile * kTile.keys;
          add_block(coord, query, key);
        }
      }
      own += sum_diagonal(key_tile);
    }
    return own;
  }

 private:
  __device__ __forceinline__ void add_block(const HeadCoord& coord, int64_t query, int64_t key) {
    if (query >= coord.sequence.num_queries || key >= coord.sequence.num_keys) return;
    const attention::Interval queries = {query, min(query + kTile.queries, coord.sequence.num_queries)};
    const attention::Interval keys = {key, min(key + kTile.keys, coord.sequence.num_keys)};
    const attention::Interval seen = p.visibility.keys_of_tile(queries, coord.sequence);
    if (seen.begin >= keys.end || seen.end <= keys.begin) return;
    const MaskCoverage attended = mask_coverage(p, coord, queries, keys);
    if (attended == MaskCoverage::kNone) return;
    this->add({.where = {p, coord, query + tile::warp() * kRowsPerWarp, key},
               .masked = attended == MaskCoverage::kMixed,
               .full = false,
               .queries = queries,
               .keys = keys});
  }

  // Elements of queries that do not exist are 0, and so are those of keys that do not, since no query sees them.
  __device__ __forceinline__ float sum_diagonal(int key_tile) {
    this->share_sums();
    const int first = static_cast<int>(threadIdx.x) - (kBlock - 1) - key_tile * kTile.keys;
    float sum = 0.0f;
    for (int query = 0; query < kBlock; ++query) {
      const int key = first + query;
      if (key >= 0 && key < kTile.keys) sum += shared.sums[query][key];
    }
    return sum;
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads)
    relative_dbias_kernel(const __grid_constant__ RelativeDbiasParams params) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const BlockDiagonals& blocks = params.blocks;
  const auto cta = static_cast<int>(blockIdx.x);
  const BlockDiagonalWork work = block_diagonal_work(blocks, cta);
  Kernel kernel(params.p, *reinterpret_cast<typename Kernel::Shared*>(shared_memory));
  params.diagonal_sums[work.place_of_sums(blocks) * blocks.sums_of_cta() + threadIdx.x] = kernel.run(blocks, work);
}

template <class Element>
cudaError_t relative_dbias(const BackwardParams& p, const BackwardPlan& plan, cudaStream_t stream) {
  return with_dscore_head_dim<Element>(plan.dscore_head_dim, [&](auto head_dim) {
    using Kernel = RelativeDbiasKernel<Element, head_dim()>;
    const RelativeDbiasParams params = {
        {p}, BlockDiagonals::of(p, Kernel::kBlock, plan.dbias_splits), p.dbias_partials};
    if (params.blocks.bytes() != plan.workspace.dbias_partials.bytes) return cudaErrorInvalidValue;
    const cudaError_t error = launch<Kernel>(relative_dbias_kernel<Kernel>, params, params.blocks.num_ctas(), stream);
    if (error != cudaSuccess) return error;
    return combine_block_diagonals<Element>(params, stream);
  });
}

}  // namespace flash_attn_ext::sm80
