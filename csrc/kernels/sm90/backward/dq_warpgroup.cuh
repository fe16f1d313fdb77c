// The warpgroup that computes dQ = scale * dS K of each visit, from dS that the others leave in shared memory.
#pragma once

#include "kernels/epilogue/store_quads.cuh"
#include "kernels/sm90/backward/kept_scores.cuh"
#include "kernels/sm90/backward/traits.h"
#include "ptx/global_memory.h"

namespace flash_attn_ext::sm90 {

template <class Traits>
struct DqWarpgroup {
  using Element = typename Traits::Element;
  using Shared = BackwardShared<Traits>;
  using Dq = tile::WarpgroupAccumulator<tile::kBoxColumns>;  // as many columns at a time as registers hold
  static constexpr int kChunks = Traits::kDims.qk / tile::kBoxColumns;
  static constexpr int kChunkFloats = Traits::kQueries * tile::kBoxColumns;

  const BackwardArguments& args;
  Shared& shared;
  typename decltype(Shared::k_ring)::Position k_at{};
  typename Shared::Stage dscore_at{};
  int seed[2] = {};        // of dropout; likewise:
  uint32_t words[2] = {};  // DropoutDraws
  WalkPosition drawn{};    // the visit that comes next
  typename decltype(Shared::sum_ring)::Position sum_at{};
  typename decltype(Shared::work_ring)::Position work_at{};

  __device__ __forceinline__ void run() {
    if constexpr (Traits::kDrops) {
      const auto bits = static_cast<uint64_t>(*args.params.dropout.seed);
      seed[0] = static_cast<int>(bits);
      seed[1] = static_cast<int>(bits >> 32);
    }
#pragma unroll 1
    for (;;) {
      shared.work_ring.wait_full(work_at);
      const KeyTileWork& work = shared.work[work_at.stage];
      if (uniform(work.batch) == KeyTileWork::kEnd) break;
      const int visits = uniform(work.visits);
      if constexpr (Traits::kDrops) draw_first(work, min(visits, Shared::kStages));
      shared.k_ring.wait_full(k_at);
#pragma unroll 1
      for (int i = 0; i < visits; ++i) add(work, shared.visit(dscore_at), i + Shared::kStages < visits);
      __syncwarp();
      if (tile::lane() == 0) {
        if (visits == 0) ptx::arrive(shared.k_ring.empty[k_at.stage]);
        ptx::arrive(shared.work_ring.empty[work_at.stage]);
      }
      k_at.advance();
      work_at.advance();
    }
    // Both adders end.
#pragma unroll 1
    for (int i = 0; i < Shared::kSums; ++i) {
      shared.sum_ring.wait_empty(sum_at);
      publish(PendingSum::kEnd, 0);
    }
  }

 private:
  static constexpr int kThreads = tile::kWarpgroupSize;
  __device__ __forceinline__ static int thread() { return static_cast<int>(threadIdx.x) % kThreads; }

  // draws: for the visit that comes when all stages have gone round.
  __device__ __forceinline__ void add(const KeyTileWork& work, const Visit& at, bool draws) {
    shared.dscore_ring.wait_full(dscore_at);
    Dq dq;
    start(dq, 0);
    // While the product is in flight.
    const int sums = uniform(at.sums);
    const int place = uniform(at.place);
    const bool is_last = uniform(at.is_last) != 0;
    const bool ends_tile = uniform(at.ends_tile) != 0;
    const int query_tile = uniform(at.query_tile);
    const int head = uniform(at.head);
    if (!is_last) shared.sum_ring.wait_empty(sum_at);
#pragma unroll 1
    for (int chunk = 0;;) {
      if constexpr (Traits::kDrops) {
        if (draws) draw(work, 1 - chunk, kChunks == 1 ? 0 : 1 - chunk);  // while the product is in flight
      }
      ptx::wait_products<0>();
      ptx::pin_registers(dq.c[0]);
      __syncwarp();
      if (chunk + 1 == kChunks && tile::lane() == 0) {
        if constexpr (!Traits::kDrops) ptx::arrive(shared.dscore_ring.empty[dscore_at.stage]);
        if (ends_tile) ptx::arrive(shared.k_ring.empty[k_at.stage]);
      }
      if constexpr (Traits::kDrops) {
        if (chunk + 1 == kChunks && draws) leave_words(dscore_at);
      }
      if (is_last) {
        if (place > 0) add_sums(dq, sums, place, chunk);
        store(dq, work, query_tile, head, chunk);
      } else {
        float* const to = shared.dq_sums[sum_at.stage] + chunk * kChunkFloats + thread() * 4;
#pragma unroll
        for (int j = 0; j < Dq::kColumnTiles; ++j) {
          const float(&c)[4] = dq.c[0][j];
          *reinterpret_cast<float4*>(to + j * kThreads * 4) = {c[0], c[1], c[2], c[3]};
        }
      }
      __syncwarp();
      if (++chunk == kChunks) break;
      start(dq, chunk);
    }
    if (!is_last) {
      ptx::fence_stores();
      publish(sums, place);
    }
    dscore_at.advance();
  }

  // For the first visits of a tile of keys. Stages are empty since those of the one before.
  __device__ __forceinline__ void draw_first(const KeyTileWork& work, int visits) {
    drawn = {.query_tile = work.first};
    typename Shared::Stage stage = dscore_at;
#pragma unroll 1
    for (; visits > 0; --visits) {
      draw(work, 1, 0);
      leave_words(stage);
      stage.advance();
    }
  }

  // One half of the draws for a visit after the other, from `first` down to `last`.
  __device__ __forceinline__ void draw(const KeyTileWork& work, int first, int last) {
    // Where it is pinned it is in ordinary registers, of which more are left than of uniform ones.
    const uint64_t own_seed =
        static_cast<uint32_t>(ptx::pin(seed[0])) | uint64_t{static_cast<uint32_t>(ptx::pin(seed[1]))} << 32;
    const int group = work.key_head * static_cast<int>(args.order.members) + work.member;
    const DropoutDraws<Traits> draws = {args.params.dropout, own_seed,
                                        work.batch,          group * work.heads + drawn.member,
                                        work.visitor.tile,   drawn.query_tile};
#pragma unroll 1
    for (int half = first; half >= last; --half) draws.append(words, half);
    if (last == 0) drawn.advance(work, WalkPosition::heads_first(work));
  }

  // Where dS of the visit will be, which no product may read any more.
  __device__ __forceinline__ void leave_words(const typename Shared::Stage& at) {
    meet_dq_warpgroup();
    for (int i = 0; i < 2; ++i) {
      ptx::store_shared(KeptScores<Traits>::address(shared.dscores[at.stage], 2 * (tile::warp() % 4) + i),
                        DropoutDraws<Traits>::finished(words[i], args.params.dropout));
      words[i] = 0;
    }
    __syncwarp();
    if (tile::lane() == 0) ptx::arrive(shared.dscore_ring.empty[at.stage]);
  }

  __device__ __forceinline__ void start(Dq& dq, int chunk) const {
    tile::start_transposed_product(dq, tile::BoxOperand(shared.dscores[0]).after(dscore_at.stage),
                                   tile::BoxOperand(shared.k[0]).after(k_at.stage), chunk);
  }

  __device__ __forceinline__ void publish(int sums, int place) {
    if (thread() == 0) shared.pending[sum_at.stage] = {sums, place};
    __syncwarp();
    if (tile::lane() == 0) ptx::arrive(shared.sum_ring.full[sum_at.stage]);
    sum_at.advance();
  }

  // What the other visitors have added to memory. (Their engines' writes: DqAdder.)
  __device__ __forceinline__ void add_sums(Dq& dq, int sums, int place, int chunk) const {
    if (chunk == 0) {
      while (ptx::load_acquire(args.workspace.turns + sums) != place) {
      }
      __syncwarp();
    }
    const float* const from = args.workspace.dq_sums + (int64_t{sums} * kChunks + chunk) * kChunkFloats + thread() * 4;
#pragma unroll
    for (int j = 0; j < Dq::kColumnTiles; ++j) {
      const float4 sum = __ldcg(reinterpret_cast<const float4*>(from + j * kThreads * 4));
      dq.c[0][j][0] += sum.x;
      dq.c[0][j][1] += sum.y;
      dq.c[0][j][2] += sum.z;
      dq.c[0][j][3] += sum.w;
    }
  }

  __device__ __forceinline__ void store(Dq& dq, const KeyTileWork& work, int query_tile, int head, int chunk) const {
    const attention::BackwardParams& p = args.params;
    const int first_row = query_tile * Traits::kQueries + tile::warp() % 4 * 16;
    dq.scale(args.scale);
    Element* const target = p.dq.row<Element>(work.batch, head, work.query_begin + first_row) +
                            chunk * tile::kBoxColumns * p.dq.column_stride;
    const bool suspicious =
        store_row_chunks<Element>({.data = target,
                                   .row_stride = p.dq.row_stride,
                                   .column_stride = p.dq.column_stride,
                                   .rows = work.visitor.num_queries - first_row,
                                   .columns = static_cast<int>(p.head_dim_qk) - chunk * tile::kBoxColumns},
                                  dq);
    if (suspicious) args.workspace.dq_nan_flag(p, {work.batch, head, query_tile}, tile::warp() % 4) = 1;
  }
};

}  // namespace flash_attn_ext::sm90
