// The producer: it issues the TMA loads of each work tile's Q, and of K and V tile by tile. It is one thread. Where K
// and V may be a cache there are two producers, one of Q and K and one of V, and each is a warp: a tile of small pages
// takes many loads, and each lane issues its own.
#pragma once

#include <type_traits>

#include "kernels/sm90/forward/scheduler.cuh"
#include "kernels/sm90/forward/traits.h"

namespace flash_attn_ext::sm90 {

template <class Traits>
struct ForwardProducer {
  using Shared = ForwardShared<Traits>;
  using Work = typename Shared::Work;
  using State = typename decltype(Shared::k_pipeline)::State;

  const typename Traits::Arguments& args;
  Shared& shared;
  const bool loads_keys = true;  // and Q
  const bool loads_values = true;
  typename decltype(Shared::q_pipeline)::State q_state{};
  State k_state{};
  State v_state{};
  typename decltype(Shared::work_pipeline)::State work_state{};

  static constexpr bool kHasLanes = Traits::kConfig.kv_cache;

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (;; work_state.advance()) {
      shared.work_pipeline.consumer_wait(work_state);
      const Work& work = shared.work[work_state.stage];
      if (work.kind == WorkKind::kEnd) break;
      if (work.kind != WorkKind::kAllProcessed) {
        if constexpr (Traits::kConfig.has_bias_or_mask()) {
          load_unmasked(work);
        } else {
          load(work);
        }
      } else if (!shared.wait_for_flags()) {
        break;
      }
      if constexpr (kHasLanes) __syncwarp();  // no lane reads the work tile any more
      if (is_first()) ptx::arrive(shared.work_pipeline.empty[work_state.stage]);
    }
  }

 private:
  // Where the lane's box of a tile of a cache begins. A tile is loaded in boxes of rows that lie together, and each
  // chunk of 64 columns of a box by a lane of its own.
  struct FoundRows {
    int entry;
    int row;
  };
  struct NoRows {};
  using TileRows = std::conditional_t<kHasLanes, FoundRows, NoRows>;

  // Finds the rows of tile n, whose pages are looked up while earlier tiles are loaded. Boxes after the sequence's last
  // key get a row that does not exist, so that the TMA fills them with zeros.
  __device__ __forceinline__ TileRows find_rows(const Work& work, int n) const {
    if constexpr (kHasLanes) {
      static_assert(Traits::kConfig.block_n / attention::KvCache::kPageMultiple * Traits::KTile::kChunks <=
                        tile::kWarpSize &&
                    Traits::KTile::kChunks == Traits::VTile::kChunks);
      const attention::Sequence& sequence = work.coord.sequence;
      const int key = n * Traits::kConfig.block_n + tile::lane() / Traits::KTile::kChunks * args.key_boxes.rows;
      attention::KeyRow at = {.entry = 0, .row = args.params.sequences.max_seqlen_k};
      if (n >= 0 && key < sequence.num_keys) at = args.params.cache.row(sequence.batch, key);
      return {static_cast<int>(at.entry), static_cast<int>(at.row)};
    }
    return TileRows{};
  }

  // Whether the calling thread does what is done once.
  __device__ __forceinline__ static bool is_first() { return !kHasLanes || tile::lane() == 0; }

  // In the order in which the consumers issue their GEMMs: K runs one tile ahead of V, unless there is one stage.
  __device__ __forceinline__ void load(const Work& work) {
    if (work.begin == work.end) {
      let_fetch_work(work);
      return;
    }
    // Numbers would do, but ptxas would then order the instructions of all kernels without a mask differently.
    MainloopTile at = {work.end - 1, false};
    MainloopTile next = {at.tile - 1, false};
    if (next.tile <= work.begin) let_fetch_work(work);
    TileRows rows = find_rows(work, at.tile);
    TileRows next_rows = find_rows(work, next.tile);
    load_k(work, at.tile, rows);
    load_q(work);
#pragma unroll 1
    while (next.tile >= work.begin) {
      const MainloopTile after = {next.tile - 1, false};
      if (next.tile > work.begin && after.tile <= work.begin) let_fetch_work(work);
      const TileRows after_rows = find_rows(work, after.tile);
      if constexpr (Traits::kValuesFirst) load_v(work, at.tile, rows);
      load_k(work, next.tile, next_rows);
      if constexpr (!Traits::kValuesFirst) load_v(work, at.tile, rows);
      at = next;
      next = after;
      rows = next_rows;
      next_rows = after_rows;
    }
    load_v(work, at.tile, rows);
  }

  // The same for the tiles that a mask does not hide completely. Which tiles follow is looked up two tiles ahead, after
  // the copies of a tile are issued, so that consumers wait for a look-up only at the beginning of a work tile.
  __device__ __forceinline__ void load_unmasked(const Work& work) {
    if (work.begin == work.end) {
      let_fetch_work(work);
      return;
    }
    load_unpublished_k(work, work.end - 1);
    load_q(work);
    MainloopTile at = unmasked_from<Traits>(args.params, work, work.end - 1);
    MainloopTile next = unmasked_from<Traits>(args.params, work, at.tile - 1);
    if (next.tile <= work.begin) let_fetch_work(work);
    publish_k({at, next});
    MainloopTile after = unmasked_from<Traits>(args.params, work, next.tile - 1);
    if (next.tile > work.begin && after.tile <= work.begin) let_fetch_work(work);
#pragma unroll 1
    while (next.tile >= work.begin) {
      load_unpublished_k(work, next.tile);
      publish_k({next, after});
      load_v(work, at.tile, {});
      const MainloopTile later = unmasked_from<Traits>(args.params, work, after.tile - 1);
      if (after.tile > work.begin && later.tile <= work.begin) let_fetch_work(work);
      at = next;
      next = after;
      after = later;
    }
    load_v(work, at.tile, {});
  }

  // Called at one of the last tiles of keys, so that the next work tile is known by the time it is needed.
  __device__ __forceinline__ void let_fetch_work(const Work& work) const {
    if (work.kind == WorkKind::kTile && loads_keys && is_first()) ptx::arrive(shared.may_fetch_work);
  }

  // The TMA coordinate of tile n of K or V.
  __device__ __forceinline__ static ptx::TmaCoordinate key_origin(const Work& work, const TmaDescriptor& operand, int n,
                                                                  int column) {
    return {.column = column,
            .row = static_cast<int>(work.coord.sequence.key_begin) + n * Traits::kConfig.block_n,
            .head = static_cast<int>(work.coord.key_head) * operand.head_step,
            .batch = static_cast<int>(work.coord.sequence.batch) * operand.batch_step};
  }
  // The TMA coordinate of a tile of queries.
  template <class Descriptor>
  __device__ __forceinline__ static ptx::TmaCoordinate query_origin(const Work& work, const Descriptor& operand,
                                                                    int row, int column) {
    return {.column = column,
            .row = row,
            .head = static_cast<int>(work.coord.head) * operand.head_step,
            .batch = static_cast<int>(work.coord.sequence.batch) * operand.batch_step};
  }

  __device__ __forceinline__ void load_k(const Work& work, int n, const TileRows& rows) {
    if (kHasLanes && !loads_keys) return;
    using Tile = typename Traits::KTile;
    shared.k_pipeline.producer_acquire(k_state);
    ptx::Barrier& full = shared.k_pipeline.full[k_state.stage];
    if (is_first()) ptx::arrive_expecting(full, Tile::kBytes);
    if constexpr (Traits::kConfig.kv_cache) {
      copy_cached(shared.k[k_state.stage], args.k, full, work, rows, 0);
    } else {
      shared.k[k_state.stage].copy(args.k.map, full, key_origin(work, args.k, n, 0));
    }
    k_state.advance();
  }

  // Bytes that arrive before publish_k() are counted below zero, since the barrier's phase lasts until then (PTX ISA,
  // mbarrier: range of the tx-count).
  __device__ __forceinline__ void load_unpublished_k(const Work& work, int n) {
    shared.k_pipeline.producer_acquire(k_state);
    ptx::Barrier& full = shared.k_pipeline.full[k_state.stage];
    if constexpr (Traits::kHasBoxes) {
      load_bias(work, n, full);
    }
    shared.k[k_state.stage].copy(args.k.map, full, key_origin(work, args.k, n, 0));
  }
  __device__ __forceinline__ void publish_k(const KeyIteration& iteration) {
    constexpr int kBytes = Traits::KTile::kBytes + (Traits::kHasBoxes ? sizeof(shared.bias[0]) : 0);
    shared.iterations[k_state.stage] = iteration;
    ptx::arrive_expecting(shared.k_pipeline.full[k_state.stage], kBytes);
    k_state.advance();
  }

  __device__ __forceinline__ void load_v(const Work& work, int n, const TileRows& rows) {
    if (kHasLanes && !loads_values) return;
    shared.v_pipeline.producer_acquire(v_state);
    ptx::Barrier& full = shared.v_pipeline.full[v_state.stage];
    if (is_first()) ptx::arrive_expecting(full, Traits::VTile::kBytes);
    if constexpr (Traits::kConfig.kv_cache) {
      copy_cached(shared.v[v_state.stage], args.v, full, work, rows, work.first_column);
    } else {
      shared.v[v_state.stage].copy(args.v.map, full, key_origin(work, args.v, n, work.first_column));
    }
    v_state.advance();
  }

  // Loads what find_rows() has found of a tile of K or V.
  template <class Tile>
  __device__ __forceinline__ void copy_cached(Tile& target, const TmaDescriptor& operand, ptx::Barrier& full,
                                              const Work& work, const FoundRows& found, int column) const {
    const int lane = tile::lane();
    if (lane < args.key_boxes.count * Tile::kChunks) {
      const int chunk = lane % Tile::kChunks;
      ptx::copy_box(target.data[chunk][lane / Tile::kChunks * args.key_boxes.rows], operand.map, full,
                    {.column = column + chunk * tile::kSmemChunkColumns,
                     .row = found.row,
                     .head = static_cast<int>(work.coord.key_head) * operand.head_step,
                     .batch = found.entry * operand.batch_step});
    }
    __syncwarp();
  }

  __device__ __forceinline__ void load_q(const Work& work) {
    if (kHasLanes && !loads_keys) return;
    shared.q_pipeline.producer_acquire(q_state);
    if (is_first()) {
      ptx::Barrier& full = shared.q_pipeline.full[q_state.stage];
      ptx::arrive_expecting(full, sizeof(shared.q[0]));
      if (Traits::kConfig.may_pack_heads() && args.log2_packed_heads > 0) {
        copy_packed_q(work, full);
      } else {
        copy_for_warpgroups(
            shared.q[q_state.stage], args.q, full,
            query_origin(work, args.q, static_cast<int>(work.coord.sequence.query_begin) + work.first_query, 0));
      }
    }
    if constexpr (kHasLanes) __syncwarp();  // no lane waits for the stage any more
    q_state.advance();
  }

  // The descriptor of packed rows counts heads as its rows, and queries as its heads.
  __device__ __forceinline__ void copy_packed_q(const Work& work, ptx::Barrier& full) {
#pragma unroll 1
    for (int w = 0; w < Shared::kWarpgroups; ++w) {
      const int query = (work.first_query + w * tile::kWarpgroupRows) >> args.log2_packed_heads;
      shared.q[q_state.stage][w].copy(args.q.map, full,
                                      {.column = 0,
                                       .row = static_cast<int>(work.coord.head),
                                       .head = query * args.q.head_step,
                                       .batch = static_cast<int>(work.coord.sequence.batch) * args.q.batch_step});
    }
  }

  __device__ __forceinline__ void load_bias(const Work& work, int n, ptx::Barrier& full) {
#pragma unroll 1
    for (int w = 0; w < Shared::kWarpgroups; ++w) {
      const int query = work.first_query + w * tile::kWarpgroupRows;
      shared.bias[k_state.stage][w].copy(
          args.bias.map, full,
          query_origin(work, args.bias, args.bias.row(query), args.bias.column(query, n * Traits::kConfig.block_n)));
    }
  }

  // Loads one tile for each warpgroup's queries.
  template <class Tile>
  __device__ __forceinline__ static void copy_for_warpgroups(Tile (&tiles)[Shared::kWarpgroups],
                                                             const TmaDescriptor& operand, ptx::Barrier& full,
                                                             ptx::TmaCoordinate origin) {
#pragma unroll 1
    for (int w = 0; w < Shared::kWarpgroups; ++w, origin.row += tile::kWarpgroupRows) {
      tiles[w].copy(operand.map, full, origin);
    }
  }
};

}  // namespace flash_attn_ext::sm90
