// dBias of a bias with its own value for each query and key: kept dS, summed over the heads and batch entries that
// share the bias.
//
// Grid: one block a (batch entry and head of the bias, tile of kRows x kColumns of a kept matrix). A thread owns
// 16-byte chunks of the tile and adds up those of the launch's heads in order; the sums turn to the bias's own layout
// in shared memory and are added to what earlier launches left. Bound: memory. dS is read once, dBias read and written
// once.
#pragma once

#include "kernels/sm80/launch.cuh"
#include "kernels/sm80/spill.cuh"

namespace flash_attn_ext::sm80 {

// kRowsAre: what the rows of the kept matrices are.
template <class Element, Rows kRowsAre>
struct DbiasFromSpillKernel {
  static constexpr int kTile = 64;
  static constexpr int kThreads = 256;
  static constexpr int kChunk = 8;  // elements in 16 bytes
  static constexpr int kChunksPerRow = kTile / kChunk;
  static constexpr int kRowStep = kThreads / kChunksPerRow;
  static constexpr int kRowsPerThread = kTile / kRowStep;

  struct Shared {
    float sums[kTile][kTile + 1];  // queries x keys; one more so that columns lie in different banks
  };

  const attention::BackwardParams& p;
  Shared& shared;
  int64_t first_row;  // of the tile, in a kept matrix
  int64_t first_column;
  float sums[kRowsPerThread][kChunk];

  __device__ __forceinline__ static int thread_row(int i) {
    return static_cast<int>(threadIdx.x) / kChunksPerRow + i * kRowStep;
  }
  __device__ __forceinline__ static int thread_column() {
    return static_cast<int>(threadIdx.x) % kChunksPerRow * kChunk;
  }

  // batch and head: of the bias, 0 where it is broadcast.
  __device__ __forceinline__ void run(int64_t batch, int64_t head) {
    const int64_t group = p.queries_per_key_head();
    for (auto& row : sums) {
      for (float& sum : row) sum = 0.0f;
    }
    bool any = false;
    for (int64_t index = p.first_pair * group; index < (p.first_pair + p.num_pairs) * group; ++index) {
      const WorkItem item = {p.sequences.at(index / p.num_heads_q), index % p.num_heads_q, 0};
      if (p.dbias.per_batch && item.sequence.batch != batch) continue;
      if (p.dbias.per_head && item.head != head) continue;
      any = true;
      add(item);
    }
    if (any) store(batch, head);  // the same for all threads
  }

 private:
  __device__ __forceinline__ void add(const WorkItem& item) {
    const Element* matrix = spilled_matrix(p, static_cast<const Element*>(p.spill.ds), item);
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const int64_t row = first_row + thread_row(i);
      const int64_t column = first_column + thread_column();
      if (!was_written(p, item.sequence, kRowsAre, row, column / 32 * 32)) continue;
      const uint4 chunk = __ldcs(reinterpret_cast<const uint4*>(matrix + row * p.spill.columns + column));
      const uint32_t words[] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
      for (int e = 0; e < kChunk; ++e) {
        sums[i][e] += ptx::to_float(static_cast<uint16_t>(words[e / 2] >> (e % 2 * 16)), Element{});
      }
    }
  }

  __device__ __forceinline__ void store(int64_t batch, int64_t head) {
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
#pragma unroll
      for (int e = 0; e < kChunk; ++e) {
        const int column = attention::ScoreSpill::place(thread_column() + e);  // its own inverse
        if (kRowsAre == Rows::kKeys) {
          shared.sums[column][thread_row(i)] = sums[i][e];
        } else {
          shared.sums[thread_row(i)][column] = sums[i][e];
        }
      }
    }
    __syncthreads();
    const int64_t first_query = kRowsAre == Rows::kKeys ? first_column : first_row;
    const int64_t first_key = kRowsAre == Rows::kKeys ? first_row : first_column;
    float* target = static_cast<float*>(p.dbias.data) + batch * p.dbias.batch_stride + head * p.dbias.head_stride;
    for (int index = static_cast<int>(threadIdx.x); index < kTile * kTile; index += kThreads) {
      const int64_t query = first_query + index / kTile;
      const int64_t key = first_key + index % kTile;
      if (query >= p.sequences.max_seqlen_q || key >= p.sequences.max_seqlen_k) continue;
      target[query * p.dbias.query_stride + key * p.dbias.key_stride] += shared.sums[index / kTile][index % kTile];
    }
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads)
    dbias_from_spill_kernel(const __grid_constant__ attention::BackwardParams p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const int64_t columns = p.spill.columns / Kernel::kTile;
  const int64_t rows = p.spill.rows / Kernel::kTile;
  const int64_t heads = p.dbias.per_head ? p.num_heads_q : 1;
  const int64_t matrix = blockIdx.x / (rows * columns);
  Kernel kernel = {p, *reinterpret_cast<typename Kernel::Shared*>(shared_memory),
                   blockIdx.x / columns % rows * Kernel::kTile, blockIdx.x % columns * Kernel::kTile};
  kernel.run(matrix / heads, matrix % heads);
}

// Adds what pairs [first_pair, first_pair + num_pairs) give to dBias.
template <class Element, Rows kRowsAre>
cudaError_t launch_dbias_from_spill(const attention::BackwardParams& p, cudaStream_t stream) {
  using Kernel = DbiasFromSpillKernel<Element, kRowsAre>;
  const int64_t matrices = (p.dbias.per_batch ? p.batch : 1) * (p.dbias.per_head ? p.num_heads_q : 1);
  const int64_t tiles = p.spill.rows / Kernel::kTile * (p.spill.columns / Kernel::kTile);
  return launch<Kernel>(dbias_from_spill_kernel<Kernel>, p, matrices * tiles, stream);
}

}  // namespace flash_attn_ext::sm80
