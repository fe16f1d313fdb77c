// Computes the gradient of a relative-position bias: recomputes dS, as dbias_over_batch.cuh does, and sums it along
// diagonals.
//
// Grid: one CTA for each BlockDiagonalWork. All blocks of a block diagonal (schedule/block_diagonals.h) have the same
// bias, which stays in shared memory, and the same pairs hidden by position. So the sums of dS stay in registers while
// the rows of its blocks stream past, of one batch entry after the other. At the end they go through shared memory, and
// a thread for each diagonal sums them. A second kernel adds the splits, and the two block diagonals that have a
// diagonal (combine_block_diagonals.cuh).
#pragma once

#include "kernels/sm80/backward/combine_block_diagonals.cuh"
#include "kernels/sm80/backward/dbias_over_batch.cuh"
#include "ptx/shared_memory.h"

namespace flash_attn_ext::sm80 {

using RelativeDbiasOverBatchParams = WithBlockDiagonals<DbiasOverBatchParams>;

template <class ElementType, int kHeadDim, bool kDrops>
struct RelativeDbiasOverBatchKernel : DbiasOverBatchKernel<ElementType, kHeadDim, kDrops> {
  using Base = DbiasOverBatchKernel<ElementType, kHeadDim, kDrops>;
  using Base::kKeysPerWarp;
  using Base::kStepKeys;
  using Base::kThreads;
  using Base::p;
  using Base::place;
  using Base::shared;
  using Base::sums;
  using typename Base::BiasTile;
  using typename Base::Element;
  using typename Base::Entry;
  using typename Base::Stage;
  using typename Base::StoredStatistics;
  using typename Base::Sums;

  using TileSums = float[kDbiasTile][kDbiasTile];
  static_assert(sizeof(TileSums) <= sizeof(Base::Shared::stages));

  // Returns the sum of the diagonal key - query = threadIdx.x - (kDbiasTile - 1) from the offset of the block diagonal.
  __device__ __forceinline__ float run(const BlockDiagonals& blocks, const BlockDiagonalWork& work) {
    sums.clear();
    const int offset = blocks.offset(work.index);
    if (sees_blocks(offset)) {
      load_bias(offset);
      stream_blocks(blocks, work);
    }
    hide(offset);
    return sum_diagonal();
  }

 private:
  // What a query sees, by key - query.
  __device__ __forceinline__ attention::Interval seen() const {
    const attention::Visibility& visibility = p.visibility;
    const int64_t diagonal = visibility.diagonal(this->sequence_of(0));
    return {diagonal - visibility.left, diagonal + visibility.right + 1};
  }
  __device__ __forceinline__ bool sees_blocks(int offset) const {
    return seen().begin < offset + kDbiasTile && seen().end > offset - (kDbiasTile - 1);
  }

  // A thread writes 16 bytes at a time. Pairs that do not exist get the value of one that does.
  __device__ __forceinline__ void load_bias(int offset) {
    const attention::BroadcastView& bias = p.score_mod.bias;
    const auto* values = static_cast<const uint16_t*>(bias.data) + place.head * bias.head_stride;
    const int first = 1 - static_cast<int>(p.sequences.max_seqlen_q);
    const int last = static_cast<int>(p.sequences.max_seqlen_k) - 1;
    constexpr int kChunk = BiasTile::kChunk;
    for (int i = static_cast<int>(threadIdx.x); i < kDbiasTile * BiasTile::kChunksPerRow; i += kThreads) {
      const int row = i / BiasTile::kChunksPerRow;
      const int column = i % BiasTile::kChunksPerRow * kChunk;
      uint32_t words[kChunk / 2] = {};
#pragma unroll
      for (int e = 0; e < kChunk; ++e) {
        const int diagonal = min(max(offset + column + e - row, first), last);
        words[e / 2] |= uint32_t{values[diagonal]} << (16 * (e % 2));
      }
      ptx::store_shared(shared.bias.address(row, column), uint4{words[0], words[1], words[2], words[3]});
    }
  }

  // The CTA loops over these: each batch entry of its split has all blocks of the block diagonal.
  struct BlockOfEntry {
    Entry entry;
    int entry_index;  // among the entries of all splits
    int block;
  };
  __device__ __forceinline__ bool advance_block(BlockOfEntry& at_block, const BlockDiagonals& blocks,
                                                const BlockDiagonalWork& work) {
    if (++at_block.block == blocks.end_block(work.index)) {
      at_block.block = blocks.first_block(work.index);
      at_block.entry_index += blocks.splits;
      this->advance(at_block.entry, blocks.splits);
    }
    return at_block.entry_index < this->params.entries;
  }

  // Starts to load a block. Rows past the end have weights of 0.
  __device__ __forceinline__ int start(Stage& stage, StoredStatistics (&rows)[Sums::kThreadRows],
                                       const BlockOfEntry& at_block, int offset) {
    place.first_query = at_block.block * kDbiasTile;
    place.first_key = place.first_query + offset;
    this->load(stage, at_block.entry);
    this->load_statistics(rows, at_block.entry);
#pragma unroll
    for (int r = 0; r < Sums::kThreadRows; ++r) {
      if (Base::warp_row() + Sums::row(r) >= this->num_queries()) rows[r] = {INFINITY, 0.0f, 0.0f};
    }
    return this->attends(at_block.entry);
  }

  __device__ __forceinline__ void stream_blocks(const BlockDiagonals& blocks, const BlockDiagonalWork& work) {
    const int offset = blocks.offset(work.index);
    BlockOfEntry at_block = {{0, static_cast<uint32_t>(place.head)}, work.split, blocks.first_block(work.index)};
    this->advance(at_block.entry, work.split);
    StoredStatistics next[Sums::kThreadRows];
    Base::store_word(shared.stages[0], start(shared.stages[0], next, at_block, offset));
    int current = 0;
    for (bool has_block = true; has_block; current = 1 - current) {
      QueryStatistics statistics[Sums::kThreadRows];
#pragma unroll
      for (int r = 0; r < Sums::kThreadRows; ++r)
        statistics[r] = query_statistics<true>(next[r].lse, next[r].delta, next[r].residual);
      ptx::wait_copies<0>();
      __syncthreads();  // the block's rows have arrived, and no warp reads the other stage any more
      const typename Base::Pairs pairs = this->pairs_of(at_block.entry);
      has_block = advance_block(at_block, blocks, work);
      int attends_next = 0;
      if (has_block) attends_next = start(shared.stages[1 - current], next, at_block, offset);
      const Stage& stage = shared.stages[current];
#pragma unroll
      for (int step = 0; step < kKeysPerWarp; step += kStepKeys) {
        const uint32_t word = stage.unmasked[(Base::warp_column() + step) / 32];
        if (word == 0xFFFFFFFFu) {
          this->template add<false>(stage, pairs, statistics, step, word);
        } else if (word != 0) {
          this->template add<true>(stage, pairs, statistics, step, word);
        }
      }
      if (has_block) Base::store_word(shared.stages[1 - current], attends_next);
    }
  }

  // Makes the sums 0 where position or the bias hides a pair. It hides the same pairs of all blocks.
  __device__ __forceinline__ void hide(int offset) {
    const attention::Interval visible = seen();
    const tile::LeftOperand<BiasTile> bias(shared.bias, Base::warp_row());
#pragma unroll
    for (int j = 0; j < Sums::kColumnTiles; j += 2) {
      uint32_t words[4];
      bias.load(words, 0, Base::warp_column() + 8 * j);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 added = ptx::unpack(words[i], Element{});
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = Base::warp_column() + Sums::column(j + i / 2, e);
          const int diagonal = offset + column - (Base::warp_row() + Sums::row(i % 2));
          const bool hidden =
              diagonal < visible.begin || diagonal >= visible.end || (e == 0 ? added.x : added.y) == -INFINITY;
          if (hidden) sums.at(i % 2, j + i / 2, e) = 0.0f;
        }
      }
    }
  }

  __device__ __forceinline__ float sum_diagonal() {
    auto& tile_sums = reinterpret_cast<TileSums&>(shared.stages);
    __syncthreads();  // no warp reads a stage any more
#pragma unroll
    for (int r = 0; r < Sums::kThreadRows; ++r) {
#pragma unroll
      for (int j = 0; j < Sums::kColumnTiles; ++j) {
        const int column = Base::warp_column() + Sums::column(j, 0);
        auto* to = reinterpret_cast<float2*>(&tile_sums[Base::warp_row() + Sums::row(r)][column]);
        *to = {sums.at(r, j, 0), sums.at(r, j, 1)};
      }
    }
    __syncthreads();
    const int first = static_cast<int>(threadIdx.x) - (kDbiasTile - 1);
    const int begin = max(0, -first);
    const int end = min(kDbiasTile, kDbiasTile - first);
    float sum = 0.0f;
    for (int query = begin; query < end; ++query) sum += tile_sums[query][first + query];
    return sum;
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    relative_dbias_over_batch_kernel(const __grid_constant__ RelativeDbiasOverBatchParams params) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  ptx::wait_for_kernel_before();
  ptx::allow_dependent_launch();
  const BlockDiagonalWork work = block_diagonal_work(params.blocks, static_cast<int>(blockIdx.x));
  Kernel kernel = {
      {params, params.p, *reinterpret_cast<typename Kernel::Shared*>(shared_memory), {.head = work.head}, work.split}};
  const float sum = kernel.run(params.blocks, work);
  const int64_t sums_of_cta = params.blocks.sums_of_cta();
  if (threadIdx.x < sums_of_cta)
    params.diagonal_sums[work.place_of_sums(params.blocks) * sums_of_cta + threadIdx.x] = sum;
}

template <class Element, int kHeadDim, bool kDrops>
cudaError_t relative_dbias_over_batch(const RelativeDbiasOverBatchParams& params, cudaStream_t stream) {
  using Kernel = RelativeDbiasOverBatchKernel<Element, kHeadDim, kDrops>;
  static_assert(sizeof(typename Kernel::Shared) <= kDbiasSharedBytes);
  const cudaError_t error = common::launch_blocks_early<Kernel>(relative_dbias_over_batch_kernel<Kernel>,
                                                                params.blocks.num_ctas(), stream, params);
  return error == cudaSuccess ? combine_block_diagonals<Element>(params, stream) : error;
}

}  // namespace flash_attn_ext::sm80
