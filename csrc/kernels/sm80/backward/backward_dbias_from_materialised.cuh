// dBias of a bias that has its own value for each query and key: materialised dS, summed over the heads and batch
// entries that share the bias.
//
// Grid: one CTA per (batch entry and head of the bias, kTile queries x kTile keys). A warp reads 8 rows x 32 columns of
// a materialised matrix at a time, 16 bytes per thread, and adds those of the launch's heads in order. Shared memory
// transposes the sums to the bias's own layout, and they are written 16 bytes at a time where the rows of the bias
// allow it. They are stored where the launch holds all heads that they sum, and otherwise added to what earlier
// launches wrote. The kernel is memory-bound: dS is read once, and dBias is written once, or read and written once per
// launch.
#pragma once

#include "kernels/config/sm80_backward.h"
#include "kernels/epilogue/store_dbias.cuh"
#include "kernels/schedule/bias_tiles.cuh"
#include "kernels/sm80/backward/materialised_scores.cuh"
#include "kernels/sm80/launch.cuh"
#include "kernels/sm80/sm80_kernels.h"

namespace flash_attn_ext::sm80 {

struct DbiasParams {
  BackwardParams p;
  BiasTiles tiles;
};

template <class Element>
struct DbiasFromMaterialisedKernel {
  using Store = DbiasTileStore<Element>;
  static constexpr int kTile = BiasTiles::kTile;
  static constexpr int kThreads = Store::kThreads;
  static constexpr int kBlocks = 5;  // per SM
  static constexpr int kChunk = BiasTiles::kChunk;
  static constexpr int kRowsPerThread = Store::kRowsPerThread;
  using Sums = DbiasTileSums<Element>;
  using Chunks = typename Sums::Chunks;

  struct Shared {
    // A warp's accesses are free of bank conflicts, but for two-way conflicts where the materialised rows are queries.
    typename Store::Sums sums;
  };

  const DbiasParams& params;
  Shared& shared;
  int64_t first_query;
  int64_t first_key;
  uint32_t written;  // which of the thread's chunks were materialised, as bits
  Sums sums;

  // The thread's chunks, of materialised rows as well as of rows of the bias.
  __device__ __forceinline__ static int thread_row(int i) { return Store::thread_row(i); }
  __device__ __forceinline__ static int thread_column() { return Store::thread_column(); }

  // batch and head are those of the bias, and 0 where it is broadcast.
  __device__ __forceinline__ void run(uint32_t batch, uint32_t head) {
    const BackwardParams& p = params.p;
    SharingHeads heads(params.tiles, p.dbias, batch, head);
    if (heads.left == 0) return;  // the same for all threads: another launch has the matrix
    find_written(p.sequences.at(heads.batch));
    sums.sum(heads, [&](Chunks& chunks) { load(chunks, heads.next(params.tiles, p)); });
    transpose();
    Store{p, first_query, first_key, params.tiles.in_chunks}.store(
        batch * p.dbias.batch_stride + head * p.dbias.head_stride, shared.sums);
  }

 private:
  __device__ __forceinline__ bool rows_are_keys() const { return params.p.materialised.rows_are_keys; }
  __device__ __forceinline__ int64_t first_row() const { return rows_are_keys() ? first_key : first_query; }
  __device__ __forceinline__ int64_t first_column() const { return rows_are_keys() ? first_query : first_key; }

  // Sets `written` for the thread's rows.
  __device__ __forceinline__ void find_written(const attention::Sequence& sequence) {
    static_assert(kTile == kMaterialisedRows);
    const WrittenColumns columns(params.p, sequence, rows_are_keys() ? Rows::kKeys : Rows::kQueries, first_row(),
                                 first_column());
    written = 0;
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      if (thread_row(i) < columns.num_rows && columns.has(thread_column())) written |= 1u << i;
    }
  }

  // Loads a head's chunks. Those that were not materialised stay 0.
  __device__ __forceinline__ void load(Chunks& chunks, const HeadCoord& coord) {
    const BackwardParams& p = params.p;
    if (p.sequences.cu_seqlens_q != nullptr) find_written(coord.sequence);  // otherwise all sequences are the same
    const Element* matrix = static_cast<const Element*>(p.materialised.ds) + materialised_matrix(p, coord) +
                            first_row() * p.materialised.columns + first_column() + thread_column();
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      if (written >> i & 1)
        chunks[i] = __ldcs(reinterpret_cast<const uint4*>(matrix + thread_row(i) * p.materialised.columns));
    }
  }

  // Transposes the sums to queries x keys.
  __device__ __forceinline__ void transpose() {
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
#pragma unroll
      for (int e = 0; e < kChunk; ++e) {
        const int column = MaterialisedScores::place<Element>(thread_column() + e);  // its own inverse
        const int row = thread_row(i);
        shared.sums[rows_are_keys() ? column : row][rows_are_keys() ? row : column] = sums.at[i][e];
      }
    }
    __syncthreads();
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBlocks)
    dbias_from_materialised_kernel(const __grid_constant__ DbiasParams params) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const BiasTiles::Place at = params.tiles.place(blockIdx.x);
  const int64_t first_column = int64_t{at.column} * Kernel::kTile;
  const int64_t first_row = int64_t{at.row} * Kernel::kTile;
  const bool rows_are_keys = params.p.materialised.rows_are_keys;
  Kernel kernel = {.params = params,
                   .shared = *reinterpret_cast<typename Kernel::Shared*>(shared_memory),
                   .first_query = rows_are_keys ? first_column : first_row,
                   .first_key = rows_are_keys ? first_row : first_column};
  kernel.run(at.batch, at.head);
}

// Adds the share of pairs [first_pair, first_pair + num_pairs) to dBias.
template <class Element>
cudaError_t dbias_from_materialised(const BackwardParams& p, cudaStream_t stream) {
  using Kernel = DbiasFromMaterialisedKernel<Element>;
  const DbiasParams params = {p, make_bias_tiles(p, {p.first_pair, p.num_pairs}, p.materialised.rows_are_keys)};
  return launch<Kernel>(dbias_from_materialised_kernel<Kernel>, params, params.tiles.num_blocks, stream);
}

}  // namespace flash_attn_ext::sm80
