// dBias of a bias with its own value for each query and key: stored dS, summed over the heads and batch entries that
// share the bias.
//
// Grid: one block per (batch entry and head of the bias, kTile queries x kTile keys). A warp reads 8 rows x 32 columns
// of a stored matrix at a time, a thread 16 bytes of it, and adds up those of the launch's heads in order. The sums
// turn to the bias's own layout in shared memory, and are written 16 bytes at a time where its rows allow it: as they
// are where a launch holds all that they sum, else added to what earlier launches left. Bound: memory. dS is read once,
// and dBias written once, or read and written once per launch.
#pragma once

#include "kernels/epilogue/store_dbias.cuh"
#include "kernels/sm80/backward/stored_scores.cuh"
#include "kernels/sm80/launch.cuh"
#include "kernels/sm80/sm80_kernels.h"

namespace flash_attn_ext::sm80 {

// Block index -> (batch entry and head of the bias, tile). Divisions are prepared as in Schedule.
struct DbiasBlocks {
  uint32_t num_blocks;
  uint32_t first_pair;
  uint32_t end_pair;
  uint32_t group;       // query heads of a key head
  uint32_t first_head;  // of the bias, that the launch's pairs belong to
  Divisor heads;        // of the bias, that they belong to
  Divisor batch;
  Divisor rows;     // tiles down a stored matrix
  Divisor columns;  // tiles across it
  bool in_chunks;   // rows of dBias consist of whole chunks of 16 bytes, or 2 of them
};

struct DbiasParams {
  BackwardParams p;
  DbiasBlocks blocks;
};

// The launch's query heads that share a bias matrix, one after the other.
struct SharingHeads {
  uint32_t batch;
  uint32_t key_head;
  uint32_t head_of_group;
  uint32_t left;  // how many are still to come

  // bias_batch and bias_head: 0 where the bias is broadcast.
  __device__ __forceinline__ SharingHeads(const DbiasParams& params, uint32_t bias_batch, uint32_t bias_head) {
    const DbiasBlocks& blocks = params.blocks;
    const attention::BiasGradient& g = params.p.dbias;
    const Divisor& batches = blocks.batch;
    const uint32_t bias_key_head = bias_head / blocks.group;
    uint32_t begin = blocks.first_pair;
    uint32_t end = blocks.end_pair;
    if (g.per_head) {
      begin = max(begin, bias_key_head * batches.divisor);
      end = min(end, (bias_key_head + 1) * batches.divisor);
    }
    key_head = batches.quotient(begin);
    batch = begin - key_head * batches.divisor;
    if (g.per_batch) {
      if (batch > bias_batch) ++key_head;
      batch = bias_batch;
      begin = key_head * batches.divisor + batch;
    }
    uint32_t pairs = begin < end ? end - begin : 0;
    if (g.per_batch) pairs = batches.quotient(pairs + batches.divisor - 1);
    head_of_group = g.per_head ? bias_head - bias_key_head * blocks.group : 0;
    left = g.per_head ? pairs : pairs * blocks.group;
  }

  __device__ __forceinline__ WorkItem next(const DbiasParams& params) {
    const DbiasBlocks& blocks = params.blocks;
    const attention::BiasGradient& g = params.p.dbias;
    const WorkItem item = {params.p.sequences.at(batch), key_head * blocks.group + head_of_group, key_head};
    --left;
    if (!g.per_head) {
      head_of_group = head_of_group + 1 == blocks.group ? 0 : head_of_group + 1;
      if (head_of_group != 0) return item;
    }
    if (!g.per_batch) batch = batch + 1 == blocks.batch.divisor ? 0 : batch + 1;
    if (g.per_batch || batch == 0) ++key_head;
    return item;
  }
};

template <class Element>
struct DbiasFromStoredKernel {
  static constexpr int kTile = 64;
  static constexpr int kThreads = 128;
  static constexpr int kBlocks = 5;  // a multiprocessor
  static constexpr int kChunk = 8;   // elements in 16 bytes
  static constexpr int kRowsPerThread = kTile * kTile / (kThreads * kChunk);
  static constexpr int kHeadsInFlight = 2;

  struct Shared {
    // Queries x keys. With rows of this length a warp's accesses lie in different banks, but for twofold conflicts
    // where stored rows are queries.
    float sums[kTile][kTile + 4];
  };

  const DbiasParams& params;
  Shared& shared;
  int64_t first_query;
  int64_t first_key;
  uint32_t written;  // which of the thread's chunks are, as bits
  float sums[kRowsPerThread][kChunk];

  // The thread's chunks, of the stored rows as well as of the bias's.
  __device__ __forceinline__ static int thread_row(int i) {
    return (tile::warp() / 2 + i * (kThreads / kWarpSize / 2)) * 8 + tile::lane() / 4;
  }
  __device__ __forceinline__ static int thread_column() { return tile::warp() % 2 * 32 + tile::lane() % 4 * kChunk; }

  // batch and head: of the bias, 0 where it is broadcast.
  __device__ __forceinline__ void run(uint32_t batch, uint32_t head) {
    const BackwardParams& p = params.p;
    SharingHeads heads(params, batch, head);
    if (heads.left == 0) return;  // the same for all threads: the matrix is another launch's
    for (auto& row : sums) {
      for (float& sum : row) sum = 0.0f;
    }
    find_written(p.sequences.at(heads.batch));
    while (heads.left > 0) {
      uint4 chunks[kHeadsInFlight][kRowsPerThread] = {};
#pragma unroll
      for (auto& of_head : chunks) {
        if (heads.left > 0) load(of_head, heads.next(params));
      }
#pragma unroll
      for (const auto& of_head : chunks) add(of_head);
    }
    turn();
    store(batch * p.dbias.batch_stride + head * p.dbias.head_stride);
  }

 private:
  __device__ __forceinline__ bool rows_are_keys() const { return params.p.stored.rows_are_keys; }
  __device__ __forceinline__ int64_t first_row() const { return rows_are_keys() ? first_key : first_query; }
  __device__ __forceinline__ int64_t first_column() const { return rows_are_keys() ? first_query : first_key; }

  // For the thread's rows.
  __device__ __forceinline__ void find_written(const attention::Sequence& sequence) {
    static_assert(kTile == kStoredRows);
    const WrittenColumns columns(params.p, sequence, rows_are_keys() ? Rows::kKeys : Rows::kQueries, first_row(),
                                 first_column());
    written = 0;
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      if (thread_row(i) < columns.num_rows && columns.has(thread_column())) written |= 1u << i;
    }
  }

  // A head's chunks; those that were not written stay zeros.
  __device__ __forceinline__ void load(uint4 (&chunks)[kRowsPerThread], const WorkItem& item) {
    const BackwardParams& p = params.p;
    if (p.sequences.cu_seqlens_q != nullptr) find_written(item.sequence);  // else all are the same
    const Element* matrix = static_cast<const Element*>(p.stored.ds) + stored_matrix(p, item) +
                            first_row() * p.stored.columns + first_column() + thread_column();
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      if (written >> i & 1)
        chunks[i] = __ldcs(reinterpret_cast<const uint4*>(matrix + thread_row(i) * p.stored.columns));
    }
  }

  __device__ __forceinline__ void add(const uint4 (&chunks)[kRowsPerThread]) {
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const uint32_t words[] = {chunks[i].x, chunks[i].y, chunks[i].z, chunks[i].w};
#pragma unroll
      for (int e = 0; e < kChunk; ++e) {
        sums[i][e] += ptx::to_float(static_cast<uint16_t>(words[e / 2] >> (e % 2 * 16)), Element{});
      }
    }
  }

  // The sums, to queries x keys.
  __device__ __forceinline__ void turn() {
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
#pragma unroll
      for (int e = 0; e < kChunk; ++e) {
        const int column = StoredScores::place<Element>(thread_column() + e);  // its own inverse
        const int row = thread_row(i);
        shared.sums[rows_are_keys() ? column : row][rows_are_keys() ? row : column] = sums[i][e];
      }
    }
    __syncthreads();
  }

  // offset: of the bias's matrix.
  __device__ __forceinline__ void store(int64_t offset) {
    const attention::BiasGradient& g = params.p.dbias;
    if (!params.blocks.in_chunks) {
      store_elements(offset);
      return;
    }
    const int num_queries = static_cast<int>(min(params.p.sequences.max_seqlen_q - first_query, int64_t{kTile}));
    if (first_key + thread_column() >= params.p.sequences.max_seqlen_k) return;
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      if (thread_row(i) >= num_queries) continue;
      const auto* values = reinterpret_cast<const float4*>(&shared.sums[thread_row(i)][thread_column()]);
      const int64_t row = offset + (first_query + thread_row(i)) * g.query_stride;
      store_dbias_chunk<Element>(g, row + first_key + thread_column(), values[0], values[1]);
    }
  }

  // One element at a time, neighbouring threads neighbouring ones.
  __device__ __forceinline__ void store_elements(int64_t offset) {
    const attention::BiasGradient& g = params.p.dbias;
    for (int index = static_cast<int>(threadIdx.x); index < kTile * kTile; index += kThreads) {
      const int64_t query = first_query + index / kTile;
      const int64_t key = first_key + index % kTile;
      if (query >= params.p.sequences.max_seqlen_q || key >= params.p.sequences.max_seqlen_k) continue;
      store_dbias<Element>(g, offset + query * g.query_stride + key * g.key_stride,
                           shared.sums[index / kTile][index % kTile]);
    }
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBlocks)
    dbias_from_stored_kernel(const __grid_constant__ DbiasParams params) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const DbiasBlocks& blocks = params.blocks;
  // Neighbouring blocks read neighbouring columns of stored rows.
  const uint32_t row_and_matrix = blocks.columns.quotient(blockIdx.x);
  const uint32_t matrix = blocks.rows.quotient(row_and_matrix);
  const uint32_t batch = blocks.heads.quotient(matrix);
  const int64_t first_column = int64_t{blockIdx.x - row_and_matrix * blocks.columns.divisor} * Kernel::kTile;
  const int64_t first_row = int64_t{row_and_matrix - matrix * blocks.rows.divisor} * Kernel::kTile;
  const bool rows_are_keys = params.p.stored.rows_are_keys;
  Kernel kernel = {.params = params,
                   .shared = *reinterpret_cast<typename Kernel::Shared*>(shared_memory),
                   .first_query = rows_are_keys ? first_column : first_row,
                   .first_key = rows_are_keys ? first_row : first_column};
  kernel.run(batch, blocks.first_head + matrix - batch * blocks.heads.divisor);
}

// Of pairs [first_pair, first_pair + num_pairs). No blocks where a grid does not hold them (num_blocks is UINT32_MAX).
template <class Kernel>
DbiasBlocks dbias_blocks(const BackwardParams& p) {
  const attention::BiasGradient& g = p.dbias;
  const int64_t query_tiles = num_tiles(p.sequences.max_seqlen_q, Kernel::kTile);
  const int64_t key_tiles = num_tiles(p.sequences.max_seqlen_k, Kernel::kTile);
  const int64_t end_pair = p.first_pair + p.num_pairs;
  const int64_t first_key_head = p.first_pair / p.batch;
  const int64_t key_heads = (end_pair + p.batch - 1) / p.batch - first_key_head;
  const int64_t group = p.queries_per_key_head();
  const int64_t heads = g.per_head ? key_heads * group : 1;
  const int64_t blocks = (g.per_batch ? p.batch : 1) * heads * query_tiles * key_tiles;
  if (blocks == 0 || blocks > INT32_MAX) return {.num_blocks = blocks == 0 ? 0 : UINT32_MAX};
  const auto whole = [](int64_t elements) { return elements % Kernel::kChunk == 0; };
  const auto divisor = [](int64_t n) { return Divisor::of(static_cast<uint32_t>(n)); };
  return {.num_blocks = static_cast<uint32_t>(blocks),
          .first_pair = static_cast<uint32_t>(p.first_pair),
          .end_pair = static_cast<uint32_t>(end_pair),
          .group = static_cast<uint32_t>(group),
          .first_head = static_cast<uint32_t>(g.per_head ? first_key_head * group : 0),
          .heads = divisor(heads),
          .batch = divisor(p.batch),
          .rows = divisor(p.stored.rows_are_keys ? key_tiles : query_tiles),
          .columns = divisor(p.stored.rows_are_keys ? query_tiles : key_tiles),
          .in_chunks = g.key_stride == 1 && reinterpret_cast<uintptr_t>(g.data) % 16 == 0 && whole(g.query_stride) &&
                       whole(g.head_stride) && whole(g.batch_stride) && whole(p.sequences.max_seqlen_k)};
}

// What pairs [first_pair, first_pair + num_pairs) give to dBias.
template <class Element>
cudaError_t dbias_from_stored(const BackwardParams& p, cudaStream_t stream) {
  using Kernel = DbiasFromStoredKernel<Element>;
  const DbiasParams params = {p, dbias_blocks<Kernel>(p)};
  return launch<Kernel>(dbias_from_stored_kernel<Kernel>, params, params.blocks.num_blocks, stream);
}

}  // namespace flash_attn_ext::sm80
