// Producer threads: one, the dynamic tile scheduler, fetches work tiles; the other issues the TMA copies of what they
// need.
#pragma once

#include "kernels/sm90/backward/key_stationary/arguments.h"
#include "kernels/sm90/backward/key_stationary/key_epilogue.cuh"
#include "kernels/sm90/backward/key_stationary/traits.h"
#include "kernels/sm90/tile_scheduler.cuh"
#include "ptx/bulk_copy.h"
#include "ptx/global_memory.h"

namespace flash_attn_ext::sm90 {

// The iterations of a key tile that a mask leaves, for the thread that issues the TMA copies.
//
// The loop goes through the query heads one after the other, each with its own list. In descending order all heads
// share a list, and the loop goes through all of them at one query tile before it continues with the next tile. The key
// tile must have iterations.
struct ListedIterations {
  const KeyStationaryArguments& args;
  const MaskedKeyTileWork& work;
  int head;  // of the iteration

  __device__ __forceinline__ ListedIterations(const KeyStationaryArguments& arguments, const MaskedKeyTileWork& tile)
      : args(arguments), work(tile), head(first_head()) {
    open();
    if (work.first_iteration > 0) go_to_first();
  }

  __device__ __forceinline__ MaskIterations::Entry entry() const { return args.mask.entries[at_]; }

  // Goes on to the next iteration, which must exist.
  __device__ __forceinline__ void advance() {
    if (work.contributor.direction == LoopDirection::kDescending) {
      if (++head == first_head() + work.heads) {
        head = first_head();
        ++at_;
      }
    } else if (++at_ == end_) {
      ++head;
      open();
    }
  }

  // Prefetches an iteration's bits to L2.
  __device__ __forceinline__ void fetch(int tile) const {
    if (!args.mask.has_words) return;
    ptx::prefetch_bytes(args.mask.words + int64_t{tile} * MaskIterations::kThreads,
                        MaskIterations::kThreads * sizeof(uint32_t));
  }

 private:
  // Skips the iterations of earlier parts.
  __device__ __forceinline__ void go_to_first() {
    if (work.contributor.direction == LoopDirection::kDescending) {
      const int queries = work.first_iteration / work.heads;
      at_ += queries;
      head += work.first_iteration - queries * work.heads;
      return;
    }
    auto left = static_cast<uint32_t>(work.first_iteration);
#pragma unroll 1
    for (; left >= end_ - at_; open()) {
      left -= end_ - at_;
      ++head;
    }
    at_ += left;
  }

  __device__ __forceinline__ int first_head() const {
    return (work.key_head * static_cast<int>(args.order.kv_group_shares) + work.kv_group_share) * work.heads;
  }

  // Opens the list of the head, or of the next one that has iterations.
  __device__ __forceinline__ void open() {
#pragma unroll 1
    for (;; ++head) {
      const int64_t list = args.mask.list(work.batch, head, work.contributor.direction, work.contributor.tile);
      at_ = args.mask.first_entry(list);
      end_ = at_ + args.mask.counts[list];
      if (at_ != end_) break;
    }
  }

  uint32_t at_ = 0;  // the current entry
  uint32_t end_ = 0;
};

template <class Traits>
struct KeyStationaryScheduler {
  using Shared = KeyStationaryShared<Traits>;
  using Work = typename Traits::Work;

  const typename Traits::Arguments& args;
  Shared& shared;
  typename decltype(Shared::work_pipeline)::State work_state{};

  __device__ __forceinline__ void run() {
    const uint32_t count = Traits::num_work_tiles(args);
    int parity = 0;
#pragma unroll 1
    for (uint32_t index = blockIdx.x; index < count; index = fetch_work_tile(args.workspace.work_counter)) {
      shared.work_pipeline.producer_acquire(work_state);
      ptx::arrive_expecting(shared.work_pipeline.full[work_state.stage], sizeof(Work));
      ptx::copy_bytes(&shared.work[work_state.stage], static_cast<const Work*>(args.workspace.table) + index,
                      sizeof(Work), shared.work_pipeline.full[work_state.stage]);
      shared.work_pipeline.consumer_wait(work_state);
      // Lists of masks and of packed batches may have entries behind their last work tile.
      if (shared.work[work_state.stage].batch == Work::kEnd) return;
      const int phase_end = shared.work[work_state.stage].phase_end;
      work_state.advance();
      // A CTA that fetched its next tile early would start it later than the loop order assumes. split-KV does not
      // depend on that.
      if (args.order.split_kv) continue;
      ptx::wait(shared.may_fetch_work, parity);
      parity ^= 1;
      // In cyclic order all tiles of a pair and phase must be co-resident, so the CTA fetches no other tile before all
      // of them are fetched.
      while (ptx::load_acquire(reinterpret_cast<const int*>(args.workspace.work_counter)) +
                 static_cast<int>(gridDim.x) <
             phase_end) {
      }
    }
    publish_end(shared.work, shared.work_pipeline, work_state);
  }
};

template <class Traits>
struct KeyStationaryProducer {
  using Shared = KeyStationaryShared<Traits>;

  const KeyStationaryArguments& args;
  Shared& shared;
  typename decltype(Shared::q_pipeline)::State q_state{};
  typename decltype(Shared::k_pipeline)::State k_state{};
  typename decltype(Shared::work_pipeline)::State work_state{};

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (;; work_state.advance()) {
      shared.work_pipeline.consumer_wait(work_state);
      const typename Traits::Work& work = shared.work[work_state.stage];
      if (work.batch == KeyTileWork::kEnd) break;
      if constexpr (Traits::kChunked) prefetch_partial_sums(work);
      send(work);
      ptx::arrive(shared.may_fetch_work);
      ptx::arrive(shared.work_pipeline.empty[work_state.stage]);
    }
  }

 private:
  __device__ __forceinline__ void send(const typename Traits::Work& work) {
    if (work.iterations == 0) {
      drain_keys();
    } else if constexpr (Traits::kMasked) {
      load_listed(work);
    } else {
      load_all(work);
    }
  }

  // The key warpgroups still iterate over the key tile before, and read the partial sums when they have finished it.
  __device__ __forceinline__ void prefetch_partial_sums(const typename Traits::Work& work) const {
    if (!work.has_partial_sums) return;
    using Sums = ChunkSums<Traits>;
    ptx::prefetch_bytes(Sums{args, work, 0}.of_warpgroup(), Traits::kWarpgroups * Sums::kFloats * sizeof(float));
  }

  // The iterations that a mask leaves.
  __device__ __forceinline__ void load_listed(const MaskedKeyTileWork& work) {
    const int later_end = Traits::kAlibi ? end_of_later_keys(work) : 0;
    ListedIterations iterations{args, work};
#pragma unroll 1
    for (int left = work.iterations; left > 0; --left) {
      const MaskIterations::Entry entry = iterations.entry();  // arrives while the stage is awaited
      shared.q_pipeline.producer_acquire(q_state);
      typename Traits::Iteration& to = shared.iteration(q_state);
      to.query_tile = entry.query_tile;
      to.head = iterations.head;
      to.accumulator =
          iterations.head * args.workspace.accumulators_of_head + work.first_accumulator + entry.query_tile;
      to.rank = entry.rank;
      to.is_last = entry.is_last;
      to.ends_tile = left == 1;
      for (int w = 0; w < LoopOrder::kKeyWarpgroups; ++w) {
        to.is_partial[w] = !work.own[w].full(entry.query_tile);
        to.is_hidden[w] = entry.is_hidden[w];
      }
      to.mask_tile = entry.mask_tile;
      if (entry.mask_tile != MaskIterations::Entry::kNothingMasked) iterations.fetch(entry.mask_tile);
      load_queries(work, to.query_tile, to.head, to.accumulator, later_end);
      if constexpr (Traits::kAlibi) describe_alibi(work, later_end, to);
      if (has_bounds(to)) {
        ptx::copy_bytes(shared.bounds[q_state.stage].of_queries,
                        args.mask.bounds_of(work.batch, to.head, to.query_tile), args.mask.bytes_of_query_tile(),
                        shared.q_pipeline.full[q_state.stage]);
      }
      if (left > 1) iterations.advance();
      publish_iteration(work, to, left == work.iterations);
    }
  }

  __device__ __forceinline__ void load_all(const KeyTileWork& work) {
    const int first_head = work.first_head(static_cast<int>(args.params.queries_per_key_head()));
    // The query heads of a KV group come one after the other, so that L2 holds what neighbouring contributors share. In
    // descending order the loop goes through all heads at one query tile before it continues with the next tile.
    // Otherwise key tiles with shorter loops would catch up with those for which they wait.
    const bool heads_first = work.contributor.direction == LoopDirection::kDescending;
    const int later_end = Traits::kAlibi ? end_of_later_keys(work) : 0;
    int head_of_share = 0;
    int query_tile = work.first;
#pragma unroll 1
    for (int left = work.iterations; left > 0; --left) {
      const LoopOrder::Tiles contributors = work.contributor.contributors(query_tile);
      const int rank = work.contributor.rank(query_tile, contributors);
      const int head = first_head + head_of_share;
      const int accumulator = head * args.workspace.accumulators_of_head + work.first_accumulator +
                              (query_tile << args.order.log2_accumulators);
      shared.q_pipeline.producer_acquire(q_state);
      load_queries(work, query_tile, head, accumulator, later_end);
      typename Traits::Iteration& to = shared.iteration(q_state);
      static_cast<QueryIteration&>(to) = {.query_tile = query_tile,
                                          .head = head,
                                          .accumulator = accumulator,
                                          .rank = rank,
                                          .is_last = rank + 1 == contributors.end - contributors.begin,
                                          .ends_tile = left == 1,
                                          .is_partial = {!work.own[0].full(query_tile), !work.own[1].full(query_tile)}};
      if constexpr (Traits::kAlibi) describe_alibi(work, later_end, to);
      if constexpr (Traits::kKeyBias) describe_key_bias(work, to);
      publish_iteration(work, to, left == work.iterations);
      if (heads_first) {
        if (++head_of_share == work.heads) {
          head_of_share = 0;
          --query_tile;
        }
      } else {
        if (++query_tile == work.end) query_tile = work.begin;
        if (query_tile == work.first) ++head_of_share;
      }
    }
  }

  // Of query tiles below this one, no query has a diagonal key after the key tile's first key. They read the statistics
  // for later keys.
  __device__ __forceinline__ int end_of_later_keys(const KeyTileWork& work) const {
    if (args.workspace.later_statistics == nullptr) return 0;
    const int first = work.contributor.tile * Traits::kKeys - diagonal(work);
    return first < 0 ? 0 : (first + 1) / Traits::kQueries;
  }

  __device__ __forceinline__ int diagonal(const KeyTileWork& work) const {
    return args.params.visibility.top_left ? 0 : work.contributor.num_keys - work.contributor.num_queries;
  }

  __device__ __forceinline__ void describe_alibi(const KeyTileWork& work, int later_end,
                                                 typename Traits::Iteration& to) const {
    // The diagonal of the key tile crosses at most so many query tiles.
    constexpr int kCrossed = Traits::kKeys / Traits::kQueries + 1;
    const float slope = kLog2e * args.params.score_mod.alibi.at<float>(work.batch, to.head);
    to.first_diagonal = to.query_tile * Traits::kQueries + diagonal(work);
    to.slope = to.query_tile < later_end ? -slope : slope;
    to.may_cross_diagonal = args.workspace.later_statistics != nullptr && to.query_tile >= later_end &&
                            to.query_tile < later_end + kCrossed;
  }

  __device__ __forceinline__ void describe_key_bias(const KeyTileWork& work, KeyBiasIteration& to) const {
    const attention::BroadcastView& bias = args.params.score_mod.bias;
    to.of_head =
        static_cast<const typename Traits::KeyBiasElement*>(bias.data) + bias.offset({work.batch, to.head, 0, 0});
    if constexpr (Traits::kSumsDscores) {
      to.reference = args.key_bias_maxima.of(args.params, work.sequence(), to.head, to.query_tile * Traits::kQueries);
      to.ignores_scores = false;
      to.shift = args.shift;
      return;
    }
    const KeyBiasReference reference = KeyBiasReference::of<typename Traits::Element>(
        args.params, work.batch, to.head, work.query_begin, work.contributor.num_keys);
    to.reference = reference.value;
    to.ignores_scores = reference.is_dominant;
    to.shift = Traits::kConfig.adds_statistics ? args.shift : 0.0f;
    // What the GEMM adds to S is ignored, too, so that the residual is in the shift.
    const attention::StatisticView& residuals = args.params.lse_residual;
    if (reference.is_dominant && Traits::kConfig.adds_statistics && residuals.present()) {
      to.shift -= kLog2e * *residuals.at<const float>(work.batch, to.head, work.query_begin);
    }
  }

  // The copies of an iteration's Q and statistics need not wait for its description. The barrier's phase lasts until
  // publish_iteration() arrives, and bytes that arrive before are counted below zero (PTX ISA, mbarrier: range of the
  // tx-count).
  // later_end: end_of_later_keys().
  __device__ __forceinline__ void load_queries(const KeyTileWork& work, int query_tile, int head, int accumulator,
                                               int later_end = 0) {
    ptx::Barrier& full = shared.q_pipeline.full[q_state.stage];
    const int row = work.query_begin + query_tile * Traits::kQueries;
    shared.q[q_state.stage].copy(args.q.map, full, {0, row, head * args.q.head_step, work.batch * args.q.batch_step});
    const int index = accumulator >> args.order.log2_accumulators;
    ptx::copy_bytes(
        shared.statistics[q_state.stage],
        query_tile < later_end ? args.workspace.later_statistics_of(index) : args.workspace.statistics_of(index),
        sizeof(shared.statistics[0]), full);
  }

  // Whether an iteration needs the bounds of its queries' intervals.
  __device__ __forceinline__ bool has_bounds(const MaskedIteration& iteration) const {
    return !args.mask.has_words && iteration.mask_tile != MaskIterations::Entry::kNothingMasked;
  }

  // K comes before dO, and V after it: the order in which the GEMMs need them.
  __device__ __forceinline__ void publish_iteration(const KeyTileWork& work, const typename Traits::Iteration& to,
                                                    bool is_first) {
    const int row = work.query_begin + to.query_tile * Traits::kQueries;
    uint32_t bytes = Traits::QTile::kBytes + sizeof(shared.statistics[0]);
    if constexpr (Traits::kMasked) bytes += has_bounds(to) ? args.mask.bytes_of_query_tile() : 0;
    ptx::arrive_expecting(shared.q_pipeline.full[q_state.stage], bytes);
    if (is_first) {
      shared.k_pipeline.producer_acquire(k_state);
      load_keys(work, shared.k[k_state.stage], args.k, shared.k_pipeline.full[k_state.stage]);
    }
    ptx::Barrier& dout_full = shared.dout_full[q_state.stage];
    ptx::arrive_expecting(dout_full, Traits::DoutTile::kBytes + (Traits::kBiased ? Traits::DscoreTile::kBytes : 0));
    shared.dout[q_state.stage].copy(args.dout.map, dout_full,
                                    {0, row, to.head * args.dout.head_step, work.batch * args.dout.batch_step});
    if (is_first) {
      shared.v_pipeline.producer_acquire(k_state);
      load_keys(work, shared.v[k_state.stage], args.v, shared.v_pipeline.full[k_state.stage]);
      k_state.advance();
    }
    if constexpr (Traits::kBiased) {
      // The bias is where the iteration's dS will be. That stage is empty soon after the one of Q.
      if constexpr (Traits::kDrops) {  // it is signalled when the draws are there, so the first round waits, too
        ptx::wait(shared.dscore_pipeline.empty[q_state.stage], q_state.parity);
      } else {
        shared.dscore_pipeline.producer_acquire(q_state);
      }
      const int query = to.query_tile * Traits::kQueries;
      shared.dscores[q_state.stage].copy(
          args.bias.map, dout_full,
          {args.bias.column(query, work.contributor.tile * Traits::kKeys), args.bias.row(query),
           to.head * args.bias.head_step, work.batch * args.bias.batch_step});
    }
    q_state.advance();
  }

  // A key tile without iterations takes its stages, too, because its gradients are staged there.
  __device__ __forceinline__ void drain_keys() {
    shared.k_pipeline.producer_acquire(k_state);
    ptx::arrive(shared.k_pipeline.full[k_state.stage]);
    shared.v_pipeline.producer_acquire(k_state);
    ptx::arrive(shared.v_pipeline.full[k_state.stage]);
    k_state.advance();
  }

  template <class Tile>
  __device__ __forceinline__ void load_keys(const KeyTileWork& work, Tile& tile, const TmaDescriptor& operand,
                                            ptx::Barrier& full) const {
    ptx::arrive_expecting(full, Tile::kBytes);
    const ptx::TmaCoordinate origin = {0, work.key_begin + work.contributor.tile * Traits::kKeys,
                                       work.key_head * operand.head_step, work.batch * operand.batch_step};
    if (args.order.kv_group_shares == 1) {
      tile.copy(operand.map, full, origin, ptx::evict_first());
    } else {  // the other shares of the KV group read the same keys
      tile.copy(operand.map, full, origin);
    }
  }
};

}  // namespace flash_attn_ext::sm90
