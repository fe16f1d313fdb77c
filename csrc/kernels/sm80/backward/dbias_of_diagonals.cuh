// The gradient of a bias that follows from key - query alone: dS is recomputed, as in dbias_over_batch.cuh, and summed
// along diagonals.
//
// Grid: one CTA for each (band of blocks, split, head). All blocks of a band (schedule/diagonal_bands.h) have the same
// bias, which stays in shared memory, and the same pairs hidden by position. So the sums of dS stay in registers while
// the rows of the band's blocks stream past, of one batch entry after the other. At the end they go through shared
// memory, and a thread for each diagonal sums them. A kernel adds the splits, and the two bands that share a diagonal
// (combine_bands.cuh).
#pragma once

#include "kernels/sm80/backward/combine_bands.cuh"
#include "kernels/sm80/backward/dbias_over_batch.cuh"
#include "ptx/shared_memory.h"

namespace flash_attn_ext::sm80 {

struct DbiasOfDiagonalsParams : DbiasOverBatchParams {
  DiagonalBands bands;
  float* band_sums;
};

template <class ElementType, int kHeadDim>
struct DbiasOfDiagonalsKernel : DbiasOverBatchKernel<ElementType, kHeadDim> {
  using Base = DbiasOverBatchKernel<ElementType, kHeadDim>;
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

  // Returns the sum of the diagonal key - query = threadIdx.x - (kDbiasTile - 1) from the band's first diagonal.
  __device__ __forceinline__ float run(const DiagonalBands& bands, const BandPlace& at) {
    sums.clear();
    const int offset = bands.offset(at.band);
    if (sees_band(offset)) {
      load_bias(offset);
      stream_blocks(bands, at);
    }
    hide(offset);
    return sum_diagonal();
  }

 private:
  // What a query sees of the band's pairs, by key - query.
  __device__ __forceinline__ attention::Interval seen() const {
    const attention::Visibility& visibility = p.visibility;
    const int64_t diagonal = visibility.diagonal(this->sequence_of(0));
    return {diagonal - visibility.left, diagonal + visibility.right + 1};
  }
  __device__ __forceinline__ bool sees_band(int offset) const {
    return seen().begin < offset + kDbiasTile && seen().end > offset - (kDbiasTile - 1);
  }

  // A thread writes 16 bytes at a time. Pairs that do not exist get the number of a diagonal that does.
  __device__ __forceinline__ void load_bias(int offset) {
    const attention::BroadcastView& bias = p.score_mod.bias;
    const auto* numbers = static_cast<const uint16_t*>(bias.data) + place.head * bias.head_stride;
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
        words[e / 2] |= uint32_t{numbers[diagonal]} << (16 * (e % 2));
      }
      ptx::store_shared(shared.bias.address(row, column), uint4{words[0], words[1], words[2], words[3]});
    }
  }

  // A block of a batch entry.
  struct Item {
    Entry entry;
    int number;  // of the entry, among those of all splits
    int block;
  };
  __device__ __forceinline__ bool advance_item(Item& item, const DiagonalBands& bands, const BandPlace& at) {
    if (++item.block == bands.end_block(at.band)) {
      item.block = bands.first_block(at.band);
      item.number += bands.splits;
      this->advance(item.entry, bands.splits);
    }
    return item.number < this->params.entries;
  }

  // Starts to load an item. Rows past the end have weights of 0.
  __device__ __forceinline__ int start(Stage& stage, StoredStatistics (&rows)[Sums::kThreadRows], const Item& item,
                                       int offset) {
    place.first_query = item.block * kDbiasTile;
    place.first_key = place.first_query + offset;
    this->load(stage, item.entry);
    this->load_statistics(rows, item.entry);
#pragma unroll
    for (int r = 0; r < Sums::kThreadRows; ++r) {
      if (Base::warp_row() + Sums::row(r) >= this->num_queries()) rows[r] = {INFINITY, 0.0f, 0.0f};
    }
    return this->attends(item.entry);
  }

  __device__ __forceinline__ void stream_blocks(const DiagonalBands& bands, const BandPlace& at) {
    const int offset = bands.offset(at.band);
    Item item = {{0, static_cast<uint32_t>(place.head)}, at.split, bands.first_block(at.band)};
    this->advance(item.entry, at.split);
    StoredStatistics next[Sums::kThreadRows];
    Base::store_word(shared.stages[0], start(shared.stages[0], next, item, offset));
    int current = 0;
    for (bool has_item = true; has_item; current = 1 - current) {
      QueryStatistics statistics[Sums::kThreadRows];
#pragma unroll
      for (int r = 0; r < Sums::kThreadRows; ++r)
        statistics[r] = query_statistics<true>(next[r].lse, next[r].delta, next[r].residual);
      ptx::wait_copies<0>();
      __syncthreads();  // the item's rows have arrived, and no warp reads the other stage any more
      has_item = advance_item(item, bands, at);
      int attends_next = 0;
      if (has_item) attends_next = start(shared.stages[1 - current], next, item, offset);
      const Stage& stage = shared.stages[current];
#pragma unroll
      for (int step = 0; step < kKeysPerWarp; step += kStepKeys) {
        const uint32_t word = stage.unmasked[(Base::warp_column() + step) / 32];
        if (word == 0xFFFFFFFFu) {
          this->template add<false>(stage, statistics, step, word);
        } else if (word != 0) {
          this->template add<true>(stage, statistics, step, word);
        }
      }
      if (has_item) Base::store_word(shared.stages[1 - current], attends_next);
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
    dbias_of_diagonals_kernel(const __grid_constant__ DbiasOfDiagonalsParams params) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  ptx::wait_for_kernel_before();
  ptx::allow_dependent_launch();
  const BandPlace at = band_place(params.bands, static_cast<int>(blockIdx.x));
  Kernel kernel = {
      {params, params.p, *reinterpret_cast<typename Kernel::Shared*>(shared_memory), {.head = at.head}, at.split}};
  const float sum = kernel.run(params.bands, at);
  const int64_t sums_of_cta = params.bands.sums_of_cta();
  if (threadIdx.x < sums_of_cta) params.band_sums[at.index(params.bands) * sums_of_cta + threadIdx.x] = sum;
}

template <class Element, int kHeadDim>
cudaError_t dbias_of_diagonals(const DbiasOfDiagonalsParams& params, cudaStream_t stream) {
  using Kernel = DbiasOfDiagonalsKernel<Element, kHeadDim>;
  static_assert(sizeof(typename Kernel::Shared) <= kDbiasSharedBytes);
  const cudaError_t error =
      common::launch_blocks_early<Kernel>(dbias_of_diagonals_kernel<Kernel>, params.bands.num_ctas(), stream, params);
  return error == cudaSuccess ? combine_bands<Element>({params.p, params.bands, params.band_sums}, stream) : error;
}

}  // namespace flash_attn_ext::sm80
