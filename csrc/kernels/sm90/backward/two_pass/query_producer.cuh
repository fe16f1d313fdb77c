// The producer thread of the dQ kernel: it fetches work tiles, finds which keys the queries of each one see, and issues
// all TMA copies.
#pragma once

#include "kernels/schedule/block.cuh"
#include "kernels/sm90/backward/two_pass/traits.h"
#include "kernels/sm90/bias_mask.cuh"
#include "kernels/sm90/tile_scheduler.cuh"

namespace flash_attn_ext::sm90 {

// Which key tiles the queries of a work tile attend, where a mask may hide whole tiles.
//
// Finds these tiles in ascending order. Several tiles are looked up at once, so that none waits for the one before it.
template <class Traits>
class UnmaskedKeys {
 public:
  struct Found {
    int tile;  // kNone: there are no more tiles
    int flags[Traits::kWarpgroups];
  };
  static constexpr int kNone = -1;

  __device__ __forceinline__ UnmaskedKeys(const TwoPassArguments& args, const QueryTileWork& work)
      : work_(work), first_(work.begin - kBatch) {
#pragma unroll
    for (int w = 0; w < Traits::kWarpgroups; ++w) {
      rows_[w] = MaskTileRow::of(args.params.score_mod.mask_tiles, work.batch, work.head, work.tile + w);
    }
  }

  __device__ __forceinline__ Found next() {
#pragma unroll 1
    while ((some_[0] | some_[1]) == 0) {
      first_ += kBatch;
      if (first_ >= work_.end) return {.tile = kNone};
      look_up();
    }
    const int i = __ffs(static_cast<int>(some_[0] | some_[1])) - 1;
    Found found = {.tile = first_ + i};
#pragma unroll
    for (int w = 0; w < Traits::kWarpgroups; ++w) {
      found.flags[w] =
          (some_[w] >> i & 1u ? UnmaskedIteration::kSeen : 0) | (mixed_[w] >> i & 1u ? UnmaskedIteration::kMasked : 0);
      some_[w] &= ~(1u << i);
    }
    return found;
  }

 private:
  static constexpr int kBatch = 8;
  static_assert(Traits::kWarpgroups == 2);

  __device__ __forceinline__ void look_up() {
#pragma unroll
    for (int w = 0; w < Traits::kWarpgroups; ++w) {
      const TileRange own = work_.own[w];
      uint32_t flags[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int tile = first_ + i;
        flags[i] = tile >= own.begin && tile < own.end ? rows_[w].flags(tile) : 0;
      }
      some_[w] = mixed_[w] = 0;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        some_[w] |= (flags[i] & attention::MaskTiles::kSomeTrue ? 1u : 0u) << i;
        mixed_[w] |= (flags[i] & attention::MaskTiles::kSomeFalse ? 1u : 0u) << i;
      }
    }
  }

  const QueryTileWork& work_;
  int first_;  // the first tile of those that were looked up together
  MaskTileRow rows_[Traits::kWarpgroups];
  uint32_t some_[Traits::kWarpgroups] = {};
  uint32_t mixed_[Traits::kWarpgroups] = {};
};

// Describes a work tile of queries to the consumers. Returns false if the sequence has no such tile.
template <class Traits>
__device__ __forceinline__ bool describe_queries(QueryTileWork& work, const TwoPassArguments& args, const Place& at) {
  const attention::BackwardParams& p = args.params;
  const attention::Sequence sequence = p.sequences.at(at.batch);
  const auto first = static_cast<int>(first_query_of(args.schedule, at, Traits::kQueries));
  const int first_row = MaterialisedTiles::first_row(p, sequence);
  const int tile = first / Traits::kRows;
  if (first >= sequence.num_queries || tile < args.tiles.begin_of(first_row) || tile >= args.tiles.end_of(first_row)) {
    return false;
  }
  describe_head(work, args.schedule, at, sequence);
  work.num_queries = static_cast<int>(sequence.num_queries);
  work.num_keys = static_cast<int>(sequence.num_keys);
  work.tile = tile;
  work.statistics = work.head * args.workspace.tiles_of_head + TwoPassWorkspace::first_tile(p, sequence) + work.tile;
  const int stored = args.tiles.first_of_head(p, sequence, work.key_head, work.head_of_group);
  const int head_of_launch = args.head_of_launch(sequence, work.key_head, work.head_of_group);
  work.sums = args.tiles.index_of_row(head_of_launch, first_row + tile);
  const SeenTiles seen = SeenTiles::of(p.visibility, sequence, args.tiles);
  TileRange all = {0, 0, 0, 0};
#pragma unroll 1
  for (int w = 0; w < Traits::kWarpgroups; ++w) {
    const TileRange own = seen.keys_of(work.tile + w);
    work.own[w] = own;
    work.stored[w] = stored + args.tiles.before(first_row + tile + w);
    all = joined(all, own);
  }
  work.begin = all.begin;
  work.end = all.end;
  return true;
}

template <class Traits>
struct QueryProducer {
  using Shared = TwoPassDqShared<Traits>;
  using Found = typename UnmaskedKeys<Traits>::Found;

  const TwoPassArguments& args;
  Shared& shared;
  tile::PipelineState<1> q_state{};
  typename decltype(Shared::k_pipeline)::State k_state{};
  typename decltype(Shared::v_pipeline)::State v_state{};
  typename decltype(Shared::work_pipeline)::State work_state{};

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (uint32_t index = blockIdx.x; index < args.schedule.num_blocks; index = fetch_work_tile(args.work_counters)) {
      shared.work_pipeline.producer_acquire(work_state);
      QueryTileWork& work = shared.work[work_state.stage];
      if (!describe_queries<Traits>(work, args, args.schedule.place(index))) continue;
      if constexpr (Traits::kSkipsTiles) {
        UnmaskedKeys<Traits> keys(args, work);
        const Found first = keys.next();
        if (first.tile == UnmaskedKeys<Traits>::kNone) work.end = work.begin;
        ptx::arrive(shared.work_pipeline.full[work_state.stage]);
        if (first.tile != UnmaskedKeys<Traits>::kNone) load_unmasked(work, keys, first);
      } else {
        ptx::arrive(shared.work_pipeline.full[work_state.stage]);
        send(work);
      }
      work_state.advance();
    }
    publish_end(shared.work, shared.work_pipeline, work_state);
  }

 private:
  // Loads K before dO and V after it, in the order in which the GEMMs need them.
  __device__ __forceinline__ void send(const QueryTileWork& work) {
    if (work.begin >= work.end) return;
    load_each(work, shared.q, args.q, shared.q_pipeline);
    load_keys(work, work.begin);
    load_each(work, shared.dout, args.dout, shared.dout_pipeline);
    q_state.advance();
    load_values(work, work.begin);
#pragma unroll 1
    for (int tile = work.begin + 1; tile < work.end; ++tile) {
      load_keys(work, tile);
      load_values(work, tile);
    }
  }

  // The same where a mask may hide whole tiles: it loads only tiles of which some query attends some key.
  __device__ __forceinline__ void load_unmasked(const QueryTileWork& work, UnmaskedKeys<Traits>& keys, Found at) {
    load_each(work, shared.q, args.q, shared.q_pipeline);
    bool is_first = true;
#pragma unroll 1
    for (;;) {
      const Found next = keys.next();
      const bool is_last = next.tile == UnmaskedKeys<Traits>::kNone;
      shared.k_pipeline.producer_acquire(k_state);
#pragma unroll
      for (int w = 0; w < Traits::kWarpgroups; ++w) {
        const int next_seen =
            !is_last && (next.flags[w] & UnmaskedIteration::kSeen) != 0 ? UnmaskedIteration::kNextSeen : 0;
        shared.iterations[k_state.stage][w].word = at.tile << UnmaskedIteration::kTileShift | at.flags[w] | next_seen |
                                                   (is_last ? UnmaskedIteration::kLast : 0);
      }
      load_keys(work, at.tile);
      if (is_first) {
        load_each(work, shared.dout, args.dout, shared.dout_pipeline);
        q_state.advance();
        is_first = false;
      }
      load_values(work, at.tile);
      if (is_last) break;
      at = next;
    }
  }

  template <class Tile>
  __device__ __forceinline__ void load_each(const QueryTileWork& work, Tile (&to)[Traits::kWarpgroups],
                                            const TmaDescriptor& operand,
                                            tile::PipelineBarriers<1> (&pipelines)[Traits::kWarpgroups]) const {
#pragma unroll 1
    for (int w = 0; w < Traits::kWarpgroups; ++w) load_queries(work, w, to[w], operand, pipelines[w]);
  }

  template <class Tile>
  __device__ __forceinline__ void load_queries(const QueryTileWork& work, int warpgroup, Tile& to,
                                               const TmaDescriptor& operand,
                                               tile::PipelineBarriers<1>& pipeline) const {
    pipeline.producer_acquire(q_state);
    ptx::arrive_expecting(pipeline.full[0], Tile::kBytes);
    to.copy(operand.map, pipeline.full[0],
            {0, work.query_begin + (work.tile + warpgroup) * Traits::kRows, work.head * operand.head_step,
             work.batch * operand.batch_step});
  }
  __device__ __forceinline__ void load_keys(const QueryTileWork& work, int tile) {
    if constexpr (!Traits::kSkipsTiles) shared.k_pipeline.producer_acquire(k_state);
    ptx::Barrier& full = shared.k_pipeline.full[k_state.stage];
    if constexpr (Traits::kHasBoxes) {
      ptx::arrive_expecting(full, Traits::KTile::kBytes + sizeof(shared.bias[0]));
      load_bias(work, tile, full);
    } else {
      ptx::arrive_expecting(full, Traits::KTile::kBytes);
    }
    load_rows(work, tile, shared.k[k_state.stage], args.k, full);
    k_state.advance();
  }
  __device__ __forceinline__ void load_values(const QueryTileWork& work, int tile) {
    shared.v_pipeline.producer_acquire(v_state);
    ptx::Barrier& full = shared.v_pipeline.full[v_state.stage];
    ptx::arrive_expecting(full, Traits::VTile::kBytes);
    load_rows(work, tile, shared.v[v_state.stage], args.v, full);
    v_state.advance();
  }
  // Loads the bias of each warpgroup's queries. Its coordinates are counted within a sequence.
  __device__ __forceinline__ void load_bias(const QueryTileWork& work, int tile, ptx::Barrier& full) const {
#pragma unroll 1
    for (int w = 0; w < Traits::kWarpgroups; ++w) {
      const int query = (work.tile + w) * Traits::kRows;
      shared.bias[k_state.stage][w].copy(args.bias.map, full,
                                         {args.bias.column(query, tile * Traits::kRows), args.bias.row(query),
                                          work.head * args.bias.head_step, work.batch * args.bias.batch_step});
    }
  }
  template <class Tile>
  __device__ __forceinline__ void load_rows(const QueryTileWork& work, int tile, Tile& to, const TmaDescriptor& operand,
                                            ptx::Barrier& full) const {
    to.copy(
        operand.map, full,
        {0, work.key_begin + tile * Traits::kRows, work.key_head * operand.head_step, work.batch * operand.batch_step});
  }
};

}  // namespace flash_attn_ext::sm90
