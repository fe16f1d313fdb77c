// dBias of a bias that has a value for each query and key, and is the same for all batch entries: dS is recomputed.
//
// Grid: one CTA for each (tile of the bias, batch split). The tile of the bias stays in shared memory, and the
// sums of dS in registers, while the rows of one batch entry after the other stream past. A mask may hide keys, the
// same ones from all queries. Position hides the same pairs of each batch entry, and so does a bias of -inf: their sums
// become 0 at the end. Where a tile has several batch splits, combine_dbias_partials_kernel adds them in a fixed order.
//
// Shared memory: the tile of the bias, and two stages of Q, dO, K, V and the mask. There is one barrier for each batch
// entry: its rows have arrived, and no warp reads the other stage any more.
#pragma once

#include "attention/division.h"
#include "kernels/common/launch/launch_early.cuh"
#include "kernels/config/dbias_over_batch.h"
#include "kernels/epilogue/store_dbias.cuh"
#include "kernels/score/dropout.cuh"
#include "kernels/score/key_mask_words.cuh"
#include "kernels/score/score_gradient.cuh"
#include "kernels/sm80/launch.cuh"
#include "ptx/dependent_launch.h"
#include "tile/sm80/copy_rows.h"
#include "tile/sm80/gemm.h"

namespace flash_attn_ext::sm80 {

struct DbiasOverBatchParams {
  attention::BackwardParams p;
  float* partials;  // of dBias; null where each tile has one batch split, which is the result
  int num_splits;
  int entries;  // of the batch, and heads where the bias is the same for all of them
  float scale;
  attention::Divisor group;  // query heads of a key head
  attention::Divisor tiles;
  attention::Divisor key_tiles;
  attention::Divisor query_tiles;
  bool in_pairs;  // pairs of neighbouring keys are aligned in dBias
};

// A tile of the bias, and the first of its queries and keys.
struct DbiasPlace {
  int head;  // 0 where the bias is the same for all heads
  int first_query;
  int first_key;
};
__device__ __forceinline__ DbiasPlace dbias_place(const DbiasOverBatchParams& params, uint32_t tile) {
  const uint32_t row = params.key_tiles.quotient(tile);
  const uint32_t head = params.query_tiles.quotient(row);
  return {static_cast<int>(head), static_cast<int>(row - head * params.query_tiles.divisor) * kDbiasTile,
          static_cast<int>(tile - row * params.key_tiles.divisor) * kDbiasTile};
}

template <class ElementType, int kHeadDim, bool kDrops>
struct DbiasOverBatchKernel {
  using Element = ElementType;
  static constexpr int kThreads = kDbiasWarps * kWarpSize;
  static constexpr int kRowsPerWarp = 16;
  static constexpr int kRowWarps = kDbiasTile / kRowsPerWarp;
  static constexpr int kKeysPerWarp = kDbiasTile * kRowWarps / kDbiasWarps;
  static constexpr int kStepKeys = 32;

  using Tile = tile::SharedTile<Element, kDbiasTile, kHeadDim>;
  using BiasTile = tile::SharedTile<Element, kDbiasTile, kDbiasTile>;
  using Sums = tile::Accumulator<1, kKeysPerWarp / 8>;
  using Scores = tile::Accumulator<1, kStepKeys / 8>;
  using Where = ScoreTile<Rows::kQueries, Scores>;

  struct alignas(128) Stage {
    Tile q;
    Tile dout;
    Tile k;
    Tile v;
    uint32_t unmasked[kDbiasTile / 32];  // the bits of the mask's keys
  };
  struct Shared {
    Stage stages[2];
    BiasTile bias;
  };

  const DbiasOverBatchParams& params;
  const attention::BackwardParams& p;
  Shared& shared;
  DbiasPlace place;
  const int split;
  Sums sums;

  __device__ __forceinline__ void run() {
    sums.clear();
    if (sees_keys()) {
      load_bias();
      iterate();
    }
    hide();
    if (params.partials == nullptr) {
      for_each_pair(
          [&](int query, int key, float low, float high) { store(params, place.head, query, key, low, high); });
    } else {
      auto* target = reinterpret_cast<float4*>(params.partials) + blockIdx.x * int64_t{Sums::kColumnTiles * kThreads};
#pragma unroll
      for (int j = 0; j < Sums::kColumnTiles; ++j) {
        const float(&c)[4] = sums.c[0][j];
        target[j * kThreads + threadIdx.x] = {c[0], c[1], c[2], c[3]};
      }
    }
  }

  // Stores two neighbouring keys of dBias.
  __device__ __forceinline__ static void store(const DbiasOverBatchParams& params, int head, int query, int key,
                                               float low, float high) {
    const attention::BackwardParams& p = params.p;
    if (query >= p.sequences.max_seqlen_q || key >= p.sequences.max_seqlen_k) return;
    const attention::BiasGradient& g = p.dbias;
    const int64_t offset = head * g.head_stride + query * g.query_stride + key * g.key_stride;
    if (params.in_pairs) {
      tile::store_pair(static_cast<Element*>(g.data) + offset, low, high);
      return;
    }
    store_dbias<Element>(g, offset, low);
    if (key + 1 < p.sequences.max_seqlen_k) store_dbias<Element>(g, offset + g.key_stride, high);
  }

  // The warp's first query, and its first key, of the tile.
  __device__ __forceinline__ static int warp_row() { return tile::warp() % kRowWarps * kRowsPerWarp; }
  __device__ __forceinline__ static int warp_column() { return tile::warp() / kRowWarps * kKeysPerWarp; }

 protected:
  // What the forward pass and delta's kernel have stored of a query. It is converted an entry later, so that nothing
  // waits for the loads.
  struct StoredStatistics {
    float lse;
    float delta;
    float residual;
  };

  __device__ __forceinline__ attention::Sequence sequence_of(int batch) const {
    return {batch, 0, 0, p.sequences.max_seqlen_q, p.sequences.max_seqlen_k};
  }

  __device__ __forceinline__ bool sees_keys() const {
    const attention::Sequence sequence = sequence_of(0);
    const int64_t end = min(int64_t{place.first_query} + kDbiasTile, sequence.num_queries);
    const attention::Interval seen = p.visibility.keys_of_tile({place.first_query, end}, sequence);
    return seen.begin < place.first_key + kDbiasTile && seen.end > place.first_key;
  }

  // The batch entry, and the head, of one of the CTA's entries. Without a division, they are found one after the other.
  struct Entry {
    uint32_t batch;
    uint32_t head;
  };
  __device__ __forceinline__ void advance(Entry& entry, int entries) const {
    const auto batch = static_cast<uint32_t>(p.batch);
    for (entry.batch += entries; entry.batch >= batch && !p.dbias.per_head; entry.batch -= batch) ++entry.head;
  }

  // The queries and keys of an entry whose dS is added.
  struct Pairs {
    Entry entry;
    int first_query;
    int first_key;
  };
  __device__ __forceinline__ Pairs pairs_of(const Entry& entry) const {
    return {entry, place.first_query, place.first_key};
  }

  // The copies are committed with those of the first batch entry.
  __device__ __forceinline__ void load_bias() {
    const attention::BroadcastView& bias = p.score_mod.bias;
    const auto* first =
        static_cast<const Element*>(bias.data) + bias.offset({0, place.head, place.first_query, place.first_key});
    tile::copy_rows_async<kThreads>(shared.bias, {first, bias.query_stride, num_keys()}, num_queries());
  }
  __device__ __forceinline__ int num_queries() const {
    return static_cast<int>(p.sequences.max_seqlen_q) - place.first_query;
  }
  __device__ __forceinline__ int num_keys() const {
    return static_cast<int>(p.sequences.max_seqlen_k) - place.first_key;
  }

  __device__ __forceinline__ void load(Stage& stage, const Entry& entry) const {
    const auto copy = [&](Tile& tile, const attention::MatrixView& view, uint32_t head, int first, int64_t columns,
                          int rows) {
      tile::copy_sequence_async<kThreads>(
          tile, {view.row<const Element>(entry.batch, head, first), view.row_stride, static_cast<int>(columns)}, rows);
    };
    const uint32_t key_head = params.group.quotient(entry.head);
    copy(stage.q, p.q, entry.head, place.first_query, p.head_dim_qk, num_queries());
    copy(stage.dout, p.dout, entry.head, place.first_query, p.head_dim_v, num_queries());
    copy(stage.k, p.k, key_head, place.first_key, p.head_dim_qk, num_keys());
    copy(stage.v, p.v, key_head, place.first_key, p.head_dim_v, num_keys());
    ptx::commit_copies();
  }

  // Sums of rows past the end are not stored. These have the statistics of the last one.
  __device__ __forceinline__ void load_statistics(StoredStatistics (&rows)[Sums::kThreadRows],
                                                  const Entry& entry) const {
#pragma unroll
    for (int r = 0; r < Sums::kThreadRows; ++r) {
      const int query = place.first_query + min(warp_row() + Sums::row(r), num_queries() - 1);
      rows[r] = {*p.lse.at<const float>(entry.batch, entry.head, query),
                 *p.delta.at<const float>(entry.batch, entry.head, query), 0.0f};
      if (p.lse_residual.present()) rows[r].residual = *p.lse_residual.at<const float>(entry.batch, entry.head, query);
    }
  }

  static constexpr int kWords = kDbiasTile / 32;
  __device__ __forceinline__ int attends(const Entry& entry) const {
    if (tile::warp() >= kWords) return 0;
    return lane_key_is_unmasked(p, {sequence_of(entry.batch), entry.head, 0}, place.first_key + 32 * tile::warp());
  }
  __device__ __forceinline__ static void store_word(Stage& stage, int attends) {
    const uint32_t word = __ballot_sync(0xFFFFFFFFu, attends);
    if (tile::warp() < kWords && tile::lane() == 0) stage.unmasked[tile::warp()] = word;
  }

  __device__ __forceinline__ void iterate() {
    Entry entry = {0, static_cast<uint32_t>(place.head)};
    advance(entry, split);
    load(shared.stages[0], entry);
    StoredStatistics next[Sums::kThreadRows];
    load_statistics(next, entry);
    store_word(shared.stages[0], attends(entry));
    int current = 0;
    for (int index = split; index < params.entries; index += params.num_splits) {
      QueryStatistics statistics[Sums::kThreadRows];
#pragma unroll
      for (int r = 0; r < Sums::kThreadRows; ++r)
        statistics[r] = query_statistics<true>(next[r].lse, next[r].delta, next[r].residual);
      ptx::wait_copies<0>();
      __syncthreads();  // the entry's rows have arrived, and no warp reads the other stage any more
      const Pairs pairs = pairs_of(entry);
      const bool has_next = index + params.num_splits < params.entries;
      int attends_next = 0;
      if (has_next) {
        advance(entry, params.num_splits);
        load(shared.stages[1 - current], entry);
        load_statistics(next, entry);
        attends_next = attends(entry);
      }
      const Stage& stage = shared.stages[current];
#pragma unroll
      for (int step = 0; step < kKeysPerWarp; step += kStepKeys) {
        const uint32_t word = stage.unmasked[(warp_column() + step) / 32];
        if (word == 0xFFFFFFFFu) {
          add<false>(stage, pairs, statistics, step, word);
        } else if (word != 0) {
          add<true>(stage, pairs, statistics, step, word);
        }
      }
      if (has_next) store_word(shared.stages[1 - current], attends_next);
      current = 1 - current;
    }
  }

  // Adds dS of kStepKeys keys, of which the mask leaves those in word.
  template <bool kMasked>
  __device__ __forceinline__ void add(const Stage& stage, const Pairs& pairs,
                                      const QueryStatistics (&statistics)[Sums::kThreadRows], int step, uint32_t word) {
    const int first = warp_column() + step;
    Scores gradients;
    gradients.clear();
    tile::multiply_head_dims(gradients, stage.dout, warp_row(), stage.v.template rows_from<kStepKeys>(first));
    if constexpr (kDrops) drop(gradients, pairs, first);  // before S is there, since registers are short
    Scores scores;
    scores.clear();
    tile::multiply_head_dims(scores, stage.q, warp_row(), stage.k.template rows_from<kStepKeys>(first));
    const tile::LeftOperand<BiasTile> bias(shared.bias, warp_row());
    const uint32_t own = own_columns(word);
#pragma unroll
    for (int j = 0; j < Scores::kColumnTiles; j += 2) {
      uint32_t words[4];  // of the two rows in column tile j, then in the next one
      bias.load(words, 0, first + 8 * j);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const QueryStatistics& query = statistics[i % 2];
        const float2 added = ptx::unpack(words[i], Element{});
        const int column_tile = j + i / 2;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float score = fmaf(scores.at(i % 2, column_tile, e), params.scale, e == 0 ? added.x : added.y);
          const float above = score - query.lse;
          const float probability = ptx::exp2(above * kLog2e - query.residual);
          const float dscore = probability * (gradients.at(i % 2, column_tile, e) - query.delta);
          // Selects 0 instead of multiplying by it, since a NaN in a key that is hidden must not reach the sum.
          const bool counts = (!kMasked || column_is_unmasked(own, column_tile, e)) && probability != 0.0f;
          sums.at(i % 2, step / 8 + column_tile, e) += counts ? dscore : 0.0f;
        }
      }
    }
  }

  // The gradient of dropout. first: the first of the keys in the tile.
  __device__ __forceinline__ void drop(Scores& gradients, const Pairs& pairs, int first) const {
    const HeadCoord coord = {sequence_of(pairs.entry.batch), pairs.entry.head, 0};
    const Where where = {p, coord, pairs.first_query + warp_row(), pairs.first_key + first};
    const auto rescale = static_cast<float>(p.dropout.rescale);
    draw_dropout(where, [&](int r, int j, int e, bool kept) {
      gradients.at(r, j, e) = kept ? gradients.at(r, j, e) * rescale : 0.0f;
    });
  }

  // Makes the sums 0 where position or the bias hides a pair.
  __device__ __forceinline__ void hide() {
    const tile::LeftOperand<BiasTile> bias(shared.bias, warp_row());
#pragma unroll
    for (int j = 0; j < Sums::kColumnTiles; j += 2) {
      uint32_t words[4];
      bias.load(words, 0, warp_column() + 8 * j);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int query = place.first_query + warp_row() + Sums::row(i % 2);
        const attention::Interval seen = p.visibility.keys_of(query, sequence_of(0));
        const float2 added = ptx::unpack(words[i], Element{});
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int key = place.first_key + warp_column() + Sums::column(j + i / 2, e);
          const bool hidden = key < seen.begin || key >= seen.end || (e == 0 ? added.x : added.y) == -INFINITY;
          if (hidden) sums.at(i % 2, j + i / 2, e) = 0.0f;
        }
      }
    }
  }

  template <class Function>
  __device__ __forceinline__ void for_each_pair(Function&& function) const {
#pragma unroll
    for (int r = 0; r < Sums::kThreadRows; ++r) {
#pragma unroll
      for (int j = 0; j < Sums::kColumnTiles; ++j) {
        function(place.first_query + warp_row() + Sums::row(r), place.first_key + warp_column() + Sums::column(j, 0),
                 sums.at(r, j, 0), sums.at(r, j, 1));
      }
    }
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    dbias_over_batch_kernel(const __grid_constant__ DbiasOverBatchParams params) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  ptx::wait_for_kernel_before();
  ptx::allow_dependent_launch();
  const uint32_t split = params.tiles.quotient(blockIdx.x);
  Kernel kernel = {params, params.p, *reinterpret_cast<typename Kernel::Shared*>(shared_memory),
                   dbias_place(params, blockIdx.x - split * params.tiles.divisor), static_cast<int>(split)};
  kernel.run();
}

// Combines the batch splits. Grid: one CTA for each tile of the bias and column tile of a thread's sums. A thread adds
// its four sums of all splits in order.
template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads)
    combine_dbias_partials_kernel(const __grid_constant__ DbiasOverBatchParams params) {
  using Sums = typename Kernel::Sums;
  ptx::wait_for_kernel_before();
  const auto j = static_cast<int>(blockIdx.y);
  constexpr int64_t kTileSums = Sums::kColumnTiles * Kernel::kThreads;
  const auto* own =
      reinterpret_cast<const float4*>(params.partials) + blockIdx.x * kTileSums + j * Kernel::kThreads + threadIdx.x;
  float4 sum = {};
#pragma unroll 8
  for (int split = 0; split < params.num_splits; ++split) {
    const float4 value = own[int64_t{split} * params.tiles.divisor * kTileSums];
    sum = {sum.x + value.x, sum.y + value.y, sum.z + value.z, sum.w + value.w};
  }
  const DbiasPlace place = dbias_place(params, blockIdx.x);
  const int query = place.first_query + Kernel::warp_row() + Sums::row(0);
  const int key = place.first_key + Kernel::warp_column() + Sums::column(j, 0);
  Kernel::store(params, place.head, query, key, sum.x, sum.y);
  Kernel::store(params, place.head, query + 8, key, sum.z, sum.w);
}

template <class Element, int kHeadDim, bool kDrops>
cudaError_t dbias_over_batch(const DbiasOverBatchParams& params, cudaStream_t stream) {
  using Kernel = DbiasOverBatchKernel<Element, kHeadDim, kDrops>;
  static_assert(sizeof(typename Kernel::Shared) <= kDbiasSharedBytes);
  const int64_t tiles = params.tiles.divisor;
  const cudaError_t error =
      common::launch_blocks_early<Kernel>(dbias_over_batch_kernel<Kernel>, tiles * params.num_splits, stream, params);
  if (error != cudaSuccess || params.partials == nullptr) return error;
  const common::EarlyLaunch sums = {.blocks = tiles, .threads = Kernel::kThreads, .slices = Kernel::Sums::kColumnTiles};
  return common::launch_early(combine_dbias_partials_kernel<Kernel>, sums, stream, params);
}

}  // namespace flash_attn_ext::sm80
