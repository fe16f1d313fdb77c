// The score kernel: it materialises P and dS, where the accumulators of dQ do not fit registers beside those of S and
// dP. A work tile has 128 queries of a head and a span of their keys. A persistent CTA computes its tiles of 128 keys
// one after the other:
//
//   S = Q K^T  |  dP = dO V^T, beside it P = exp2(c S - lse)  |  dS = P (dP - delta)
//
//  Warpgroup 0         Producer: one thread fetches work tiles and issues all TMA copies.
//  Warpgroups 1 and 2  P and dS of 64 queries each.
//
// No operand fits shared memory as a whole. Slices of 64 columns stream through one pipeline: those of Q and K, then
// those of dO and V. The spans of a query tile are neighbours in the order of work tiles, so that the CTAs of a wave
// share the slices of few query tiles in L2.
#pragma once

#include "kernels/schedule/block.cuh"
#include "kernels/sm90/backward/two_pass/query_producer.cuh"
#include "kernels/sm90/backward/two_pass/query_scores.cuh"
#include "kernels/sm90/backward/two_pass/stored_chunks.cuh"
#include "kernels/sm90/backward/two_pass/traits.h"
#include "kernels/sm90/tile_scheduler.cuh"

namespace flash_attn_ext::sm90 {

// Traits of the score kernel.
template <class ElementType, TwoPassConfig kConfigValue>
struct TwoPassScoreTraits {
  using Element = ElementType;
  static constexpr TwoPassConfig kConfig = kConfigValue;
  static constexpr HeadDims kDims = kConfig.dims;
  static_assert(kConfig.dq_from_tiles && kConfig.score == ScoreMode::kScaleOnly);
  static constexpr bool kGeneric = false;
  static constexpr bool kHasBoxes = false;
  static constexpr bool kHasBits = false;
  static constexpr bool kHasBias = false;
  static constexpr bool kSkipsTiles = false;
  static constexpr int kRows = MaterialisedTiles::kRows;  // queries of a warpgroup, and keys of a materialised tile
  static constexpr int kWarpgroups = MaterialisedTiles::kBlockRows;
  static constexpr int kQueries = kWarpgroups * kRows;
  static constexpr int kKeyTiles = 2;                       // materialised tiles in a key tile
  static constexpr int kSpanTiles = 8;                      // materialised tiles in a work tile's span of keys
  static constexpr int kColumns = tile::kSmemChunkColumns;  // of a slice
  static constexpr int kStages = kConfig.k_stages;
  static constexpr int kThreads = tile::kWarpgroupSize * (kWarpgroups + 1);
  static_assert(kSpanTiles % kKeyTiles == 0);

  using QuerySlice = tile::SmemTile<Element, kRows, kColumns>;
  using KeySlice = tile::SmemTile<Element, kRows * kKeyTiles, kColumns>;
  using Scores = tile::WarpgroupAccumulator<kRows>;  // of a materialised tile; rows are queries
  using WideScores = tile::WarpgroupAccumulator<kRows * kKeyTiles>;
  using Where = ScoreTile<Rows::kQueries, Scores>;
};

template <class Traits>
struct TwoPassScoreShared {
  static constexpr int kComputingWarps = 4 * Traits::kWarpgroups;
  static constexpr int kWorkStages = 2;

  typename Traits::QuerySlice queries[Traits::kStages][Traits::kWarpgroups];  // of Q or dO
  typename Traits::KeySlice keys[Traits::kStages];                            // of K or V
  QueryTileWork work[kWorkStages];
  tile::PipelineBarriers<Traits::kStages> pipeline;
  tile::PipelineBarriers<kWorkStages> work_pipeline;

  __device__ __forceinline__ void init() {
    pipeline.init(kComputingWarps);
    work_pipeline.init(kComputingWarps);
    ptx::fence_barrier_init();
  }
};

template <class Traits>
__device__ __forceinline__ int count_slices(int64_t head_dim) {
  return attention::ceil_div(static_cast<int>(head_dim), Traits::kColumns);
}

template <class Traits>
struct ScoreProducer {
  using Shared = TwoPassScoreShared<Traits>;

  const TwoPassArguments& args;
  Shared& shared;
  typename decltype(Shared::pipeline)::State state{};
  typename decltype(Shared::work_pipeline)::State work_state{};

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (uint32_t index = blockIdx.x; index < args.schedule.num_blocks; index = fetch_work_tile(args.work_counters)) {
      shared.work_pipeline.producer_acquire(work_state);
      QueryTileWork& work = shared.work[work_state.stage];
      const Place at = args.schedule.place(index);
      if (!describe_queries<Traits>(work, args, at)) continue;
      work.begin += static_cast<int>(at.slice) * Traits::kSpanTiles;
      work.end = min(work.end, work.begin + Traits::kSpanTiles);
      if (work.begin >= work.end) continue;  // nothing is stored
      ptx::arrive(shared.work_pipeline.full[work_state.stage]);
      send(work);
      work_state.advance();
    }
    publish_end(shared.work, shared.work_pipeline, work_state);
  }

 private:
  __device__ __forceinline__ void send(const QueryTileWork& work) {
    const attention::BackwardParams& p = args.params;
#pragma unroll 1
    for (int tile = work.begin; tile < work.end; tile += Traits::kKeyTiles) {
      send_slices(work, tile, args.q, args.k, count_slices<Traits>(p.head_dim_qk));
      send_slices(work, tile, args.dout, args.v, count_slices<Traits>(p.head_dim_v));
    }
  }

  // Where the span has fewer keys than a tile, the rest of a slice stays as it is. Its scores are not stored.
  __device__ __forceinline__ void send_slices(const QueryTileWork& work, int tile, const TmaDescriptor& of_queries,
                                              const TmaDescriptor& of_keys, int slices) {
    constexpr int kBoxBytes = Traits::QuerySlice::kBytes;
    const int boxes = min(work.end - tile, Traits::kKeyTiles);
    const int query = work.query_begin + work.tile * Traits::kRows;
    const int key = work.key_begin + tile * Traits::kRows;
    const int head = work.head * of_queries.head_step;
    const int key_head = work.key_head * of_keys.head_step;
#pragma unroll 1
    for (int slice = 0; slice < slices; ++slice) {
      const int column = slice * Traits::kColumns;
      shared.pipeline.producer_acquire(state);
      ptx::Barrier& full = shared.pipeline.full[state.stage];
      ptx::arrive_expecting(full, (Traits::kWarpgroups + boxes) * kBoxBytes);
#pragma unroll 1
      for (int w = 0; w < Traits::kWarpgroups; ++w) {
        ptx::copy_box(shared.queries[state.stage][w].data, of_queries.map, full,
                      {column, query + w * Traits::kRows, head, work.batch * of_queries.batch_step});
      }
#pragma unroll 1
      for (int i = 0; i < boxes; ++i) {
        ptx::copy_box(shared.keys[state.stage].data[0][i * Traits::kRows], of_keys.map, full,
                      {column, key + i * Traits::kRows, key_head, work.batch * of_keys.batch_step});
      }
      state.advance();
    }
  }
};

template <class Traits>
struct ScoreWarpgroup {
  using Element = typename Traits::Element;
  using Shared = TwoPassScoreShared<Traits>;
  using Scores = typename Traits::Scores;
  using WideScores = typename Traits::WideScores;
  using Where = typename Traits::Where;
  using PackedScores = tile::PackedRows<Traits::kRows>;
  using State = typename decltype(Shared::pipeline)::State;

  const TwoPassArguments& args;
  Shared& shared;
  const int warpgroup;
  QueryScores<Traits> score{args};

  WideScores scores;
  WideScores gradients;  // dP
  State state{};         // the next slice to multiply
  State oldest{};        // the first slice that is not released
  typename decltype(Shared::work_pipeline)::State work_state{};

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (;;) {
      shared.work_pipeline.consumer_wait(work_state);
      const QueryTileWork& work = shared.work[work_state.stage];
      if (uniform(work.batch) == QueryTileWork::kEnd) break;
      materialise(work);
      consumer_release(shared.work_pipeline.empty[work_state.stage]);
      work_state.advance();
    }
  }

 private:
  static constexpr int kWarpRows = 16;
  static constexpr int kAhead = 3;  // slices of dP that overlap the exponentials of P
  static_assert(kAhead < Traits::kStages);
  __device__ __forceinline__ static int warp_row() { return tile::warp() % 4 * kWarpRows; }

  // The scores of the i-th materialised tile of a key tile.
  __device__ __forceinline__ static Scores& of_tile(WideScores& wide, int i) {
    return reinterpret_cast<Scores&>(wide.c[0][i * Scores::kColumnTiles]);
  }

  __device__ __forceinline__ void materialise(const QueryTileWork& work) {
    const TileRange own = work.own[warpgroup];
    const int own_begin = uniform(own.begin);
    const int own_end = uniform(own.end);
    const int end = uniform(work.end);
    const int qk_slices = count_slices<Traits>(args.params.head_dim_qk);
    const int v_slices = count_slices<Traits>(args.params.head_dim_v);
    if (own_begin < own_end) score.begin(args.workspace.statistics_of(work.statistics + warpgroup) + warp_row());
    const int row = warp_row() + Scores::row(0);
    Element* stored = static_cast<Element*>(args.workspace.scores) + MaterialisedTiles::offset(work.stored[warpgroup]) +
                      row * Traits::kRows + (tile::lane() % 4 ^ row % 8) * StoredChunks::kElements;
#pragma unroll 1
    for (int tile = uniform(work.begin); tile < end; tile += Traits::kKeyTiles) {
      const int first = max(tile, own_begin);
      const int last = min(min(tile + Traits::kKeyTiles, end), own_end);
      if (first < last) {
        step(work, tile, {first, last, own.full_begin, own.full_end},
             stored + int64_t{tile - own_begin} * MaterialisedTiles::kElements, qk_slices, v_slices);
      } else {
        drain(qk_slices + v_slices);
      }
    }
  }

  // Computes the materialised tiles [tile, tile + kKeyTiles). own: those that the warpgroup's queries see.
  __device__ __forceinline__ void step(const QueryTileWork& work, int tile, const TileRange& own, Element* stored,
                                       int qk_slices, int v_slices) {
    begin_gemm(scores);
    multiply(scores, 1, qk_slices);
    end_gemm();
    ptx::pin_registers(scores.c[0]);
    for_each_tile(tile, own, [&](int i) {
      if (!own.full(tile + i))
        in_tile(work, tile + i, [&](const Where& where) { where.hide_invisible(of_tile(scores, i)); });
    });
    __syncwarp();
    const int ahead = min(kAhead, v_slices);
    begin_gemm(gradients);
    issue_slices(gradients, ahead - 1);
    for_each_tile(tile, own, [&](int i) {
      PackedScores p;
      score.exponentiate(of_tile(scores, i), p, false);
      StoredChunks::store<true>(p, stored + i * MaterialisedTiles::kElements);
    });
    __syncwarp();
    ptx::wait_wgmma<1>();
    release(ahead - 1);
    multiply(gradients, ahead, v_slices);
    end_gemm();
    ptx::pin_registers(gradients.c[0]);
    for_each_tile(tile, own, [&](int i) {
      PackedScores dscores;
      score.differentiate(of_tile(scores, i), of_tile(gradients, i), dscores);
      StoredChunks::store<true>(dscores, stored + i * MaterialisedTiles::kElements + args.tiles.between);
    });
    __syncwarp();
  }

  // Calls function(i) for the materialised tiles tile + i that are among the warpgroup's own.
  template <class Function>
  __device__ __forceinline__ static void for_each_tile(int tile, const TileRange& own, Function&& function) {
#pragma unroll
    for (int i = 0; i < Traits::kKeyTiles; ++i) {
      if (tile + i >= own.begin && tile + i < own.end) function(i);
    }
  }

  // Calls function(where) with the warp's tile of scores.
  template <class Function>
  __device__ __forceinline__ void in_tile(const QueryTileWork& work, int tile, Function&& function) {
    const attention::Sequence sequence = {work.batch, work.query_begin, work.key_begin, work.num_queries,
                                          work.num_keys};
    const HeadCoord coord = {sequence, work.head, work.key_head};
    const int first_query = (work.tile + warpgroup) * Traits::kRows + warp_row();
    const Where where = {args.params, coord, first_query, tile * Traits::kRows};
    function(where);
  }

  // Issues the GEMM of one slice after the other, each while the one before it is in flight.
  __device__ __forceinline__ void multiply(WideScores& sums, int begin, int end) {
#pragma unroll 1
    for (int slice = begin; slice < end; ++slice) {
      issue_slice<true>(sums);
      ptx::wait_wgmma<1>();
      release(1);
    }
  }

  __device__ __forceinline__ void issue_slices(WideScores& sums, int count) {
#pragma unroll 1
    for (int i = 0; i < count; ++i) issue_slice<true>(sums);
  }

  // Issues the GEMM of the first slice.
  __device__ __forceinline__ void begin_gemm(WideScores& sums) {
    ptx::renew_registers(sums.c[0]);
    issue_slice<false>(sums);
  }

  template <bool kAccumulates>
  __device__ __forceinline__ void issue_slice(WideScores& sums) {
    state.stage = uniform(state.stage);
    shared.pipeline.consumer_wait(state);
    const auto left = tile::SmemOperand(shared.queries[0][0]).after(state.stage * Traits::kWarpgroups + warpgroup);
    const auto right = tile::SmemOperand(shared.keys[0]).after(state.stage);
    ptx::pin_registers(sums.c[0]);
    ptx::fence_wgmma();
#pragma unroll
    for (int k = 0; k < Traits::kColumns / 16; ++k) {
      ptx::multiply_async(sums.c[0], left.columns(k), right.columns(k), k > 0 || kAccumulates, Element{});
    }
    ptx::commit_wgmma();
    state.advance();
  }

  __device__ __forceinline__ void end_gemm() {
    ptx::wait_wgmma<0>();
    release(1);
  }

  // Releases slices whose GEMMs are complete.
  __device__ __forceinline__ void release(int count) {
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      consumer_release(shared.pipeline.empty[oldest.stage]);
      oldest.advance();
    }
  }

  // Drains slices of keys that only the other warpgroup's queries see.
  __device__ __forceinline__ void drain(int slices) {
#pragma unroll 1
    for (int i = 0; i < slices; ++i) {
      shared.pipeline.consumer_wait(state);
      state.advance();
      release(1);
    }
  }
};

}  // namespace flash_attn_ext::sm90
