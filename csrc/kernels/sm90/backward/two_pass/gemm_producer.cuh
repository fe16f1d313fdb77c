// The producer thread of the GEMM kernel: it fetches work tiles, finds which queries see the keys of each one, and
// issues the copies of materialised tiles and of the dO or Q that they are multiplied with.
#pragma once

#include "kernels/schedule/block.cuh"
#include "kernels/sm90/backward/two_pass/traits.h"
#include "kernels/sm90/bias_mask.cuh"
#include "kernels/sm90/tile_scheduler.cuh"
#include "ptx/bulk_copy.h"

namespace flash_attn_ext::sm90 {

template <class Traits>
struct GemmProducer {
  using Element = typename Traits::Element;
  using Shared = TwoPassGemmShared<Traits>;
  using Work = typename Shared::Work;

  const TwoPassArguments& args;
  Shared& shared;
  typename decltype(Shared::pipeline)::State state{};
  typename decltype(Shared::work_pipeline)::State work_state{};

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (uint32_t index = blockIdx.x; index < args.schedule.num_blocks; index = fetch_work_tile(args.work_counters)) {
      shared.work_pipeline.producer_acquire(work_state);
      Work& work = shared.work[work_state.stage];
      if (!describe(work, index)) continue;
      ptx::arrive(shared.work_pipeline.full[work_state.stage]);
      if (work.is_dk) {
        send<Traits::kDims.qk>(work, args.q, args.tiles.between);
      } else {
        send<Traits::kDims.v>(work, args.dout, 0);
      }
      work_state.advance();
    }
    publish_end(shared.work, shared.work_pipeline, work_state);
  }

 private:
  // Returns false if the launch or the sequence has no such tile.
  __device__ __forceinline__ bool describe(Work& work, uint32_t index) const {
    const attention::BackwardParams& p = args.params;
    const Place at = args.schedule.place(index);
    const attention::Sequence sequence = p.sequences.at(at.batch);
    const auto first = static_cast<int>(first_key_of(args.schedule, at, Traits::kKeys, sequence.num_keys));
    const int tile = first / Traits::kRows;
    if (first < 0 || tile < args.tiles.key_chunk_begin || tile >= args.tiles.key_chunk_end) return false;
    work.batch = static_cast<int>(at.batch);
    work.key_head = static_cast<int>(at.key_head);
    choose_result(work, at);
    work.query_begin = static_cast<int>(sequence.query_begin);
    work.key_begin = static_cast<int>(sequence.key_begin);
    work.seen = SeenTiles::of(p.visibility, sequence, args.tiles);
    work.tile = tile;
    const int pair = work.key_head * static_cast<int>(p.batch) + work.batch;
    const int64_t tile_index =
        common::flag_index(pair, static_cast<int>(args.schedule.tiles), static_cast<int>(at.tile));
    work.flags = static_cast<int>(tile_index) * Traits::kTile.flags();
    const int key_tile = first_key_tile(work, sequence) + first / Traits::kKeys;
    work.partial = key_tile * count_results() + static_cast<int>(at.slice);
    work.stored = args.tiles.first_of_head(p, sequence, work.key_head, 0);
    work.row = MaterialisedTiles::first_row(p, sequence);
    const int begin = args.tiles.begin_of(work.row);
    const int end = args.tiles.end_of(work.row);
    TileRange all = {0, 0, 0, 0};
#pragma unroll 1
    for (int w = 0; w < Traits::kWarpgroups; ++w) {
      TileRange own = work.seen.queries_of(work.tile + w);
      own.begin = max(own.begin, begin);
      own.end = min(own.end, end);
      work.own[w] = own;
      all = joined(all, own);
    }
    work.begin = all.begin;
    work.end = all.end;
    return true;
  }

  // Which gradient the work tile computes, and which column part of it.
  __device__ __forceinline__ void choose_result(Work& work, const Place& at) const {
    if constexpr (Traits::kHasParts) {
      const int parts_of_dk = args.wanted.dk ? num_column_parts(args.params.head_dim_qk) : 0;
      const auto slice = static_cast<int>(at.slice);
      work.is_dk = slice < parts_of_dk;
      work.first_column = (work.is_dk ? slice : slice - parts_of_dk) * kColumnsOfPart;
    } else {
      work.is_dk = args.wanted.dk && at.slice == 0;
    }
  }
  // The work tiles of a key tile.
  __device__ __forceinline__ int count_results() const {
    return Traits::kHasParts ? static_cast<int>(args.schedule.slices.divisor) : args.wanted.count();
  }

  // The sequence's first key tile among those of key_sums. A packed sequence begins at a tile of its own.
  __device__ __forceinline__ int first_key_tile(const Work& work, const attention::Sequence& sequence) const {
    const bool packed = args.params.sequences.cu_seqlens_q != nullptr;
    const int matrix = args.tiles.matrix(args.params, sequence, work.key_head);
    const int first = packed ? static_cast<int>(sequence.key_begin) / Traits::kKeys + work.batch : 0;
    return matrix * args.workspace.key_tiles_of_matrix + first;
  }

  static constexpr int kTileBytes = static_cast<int>(MaterialisedTiles::kBytes);
  template <int kWidth>
  using RightTile = typename Traits::template RightTile<kWidth>;

  // Loads query tile after query tile, and for each of them the heads of the KV group one after the other. matrix:
  // where P or dS begins.
  template <int kWidth>
  __device__ __forceinline__ void send(const Work& work, const TmaDescriptor& operand, int64_t matrix) {
    const Element* const stored = static_cast<const Element*>(args.workspace.scores) + matrix;
    if constexpr (Traits::kSkipsTiles) {
      load_unmasked<kWidth>(work, operand, stored);
    } else {
      load_all<kWidth>(work, operand, stored);
    }
  }

  template <int kWidth>
  __device__ __forceinline__ void load_all(const Work& work, const TmaDescriptor& operand, const Element* stored) {
    const auto group = static_cast<int>(args.params.queries_per_key_head());
    const SeenTiles seen = work.seen;
#pragma unroll 1
    for (int tile = work.begin; tile < work.end; ++tile) {
      const TileRange keys = seen.keys_of(tile);
      const int first = max(keys.begin, work.tile);
      const int count = min(keys.end, work.tile + Traits::kWarpgroups) - first;
      int materialised_tile = first_stored(work, tile) + first - keys.begin;
#pragma unroll 1
      for (int head_of_group = 0; head_of_group < group; ++head_of_group) {
        shared.pipeline.producer_acquire(state);
        ptx::Barrier& full = shared.pipeline.full[state.stage];
        ptx::arrive_expecting(full, count * kTileBytes + RightTile<kWidth>::kBytes);
        ptx::copy_bytes(&shared.left[state.stage][first - work.tile],
                        stored + MaterialisedTiles::offset(materialised_tile), count * kTileBytes, full);
        copy_right<kWidth>(work, operand, tile, head_of_group);
        materialised_tile += static_cast<int>(args.tiles.in_matrix);
        state.advance();
      }
    }
  }

  // The first materialised tile of a query tile, in the KV group's first head.
  __device__ __forceinline__ int first_stored(const Work& work, int tile) const {
    return work.stored + args.tiles.before(work.row + tile);
  }

  // Loads the tiles that were stored, where a mask may hide whole tiles. Several iterations are looked up at once, so
  // that none waits for the one before it.
  template <int kWidth>
  __device__ __forceinline__ void load_unmasked(const Work& work, const TmaDescriptor& operand, const Element* stored) {
    constexpr int kBatch = 4;
    constexpr int kBits = 8;
    static_assert(kBatch * kBits <= 32 && Traits::kWarpgroups <= kBits);
    const auto group = static_cast<int>(args.params.queries_per_key_head());
    int tile = work.begin;
    int head_of_group = 0;
    const auto advance = [group](int& of_tile, int& of_head) {
      of_head = of_head + 1 == group ? 0 : of_head + 1;
      of_tile += of_head == 0;
    };
#pragma unroll 1
    while (tile < work.end) {
      uint32_t iterations = 0;
      int tile_ahead = tile;
      int head_ahead = head_of_group;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (tile_ahead < work.end) iterations |= stored_keys(work, tile_ahead, head_ahead) << (kBits * i);
        advance(tile_ahead, head_ahead);
      }
#pragma unroll 1
      for (int i = 0; i < kBatch; ++i) {
        const uint32_t keys = iterations >> (kBits * i) & ((1u << kBits) - 1);
        if (keys != 0) {
          load_stored<kWidth>(work, operand, stored, tile, head_of_group, keys);
        }
        advance(tile, head_of_group);
      }
    }
    shared.pipeline.producer_acquire(state);
    shared.iterations[state.stage] = Shared::kEnd;
    ptx::arrive(shared.pipeline.full[state.stage]);
    state.advance();
  }

  // Which of the CTA's key tiles the dQ kernel stored for a query tile, as bits.
  __device__ __forceinline__ uint32_t stored_keys(const Work& work, int tile, int head_of_group) const {
    const auto group = static_cast<int>(args.params.queries_per_key_head());
    const TileRange keys = work.seen.keys_of(tile);
    const MaskTileRow row =
        MaskTileRow::of(args.params.score_mod.mask_tiles, work.batch, work.key_head * group + head_of_group, tile);
    uint32_t bits = 0;
#pragma unroll
    for (int w = 0; w < Traits::kWarpgroups; ++w) {
      const int key_tile = work.tile + w;
      const uint32_t flags = key_tile >= keys.begin && key_tile < keys.end ? row.flags(key_tile) : 0;
      bits |= (flags & attention::MaskTiles::kSomeTrue ? 1u : 0u) << w;
    }
    return bits;
  }

  template <int kWidth>
  __device__ __forceinline__ void load_stored(const Work& work, const TmaDescriptor& operand, const Element* stored,
                                              int tile, int head_of_group, uint32_t keys) {
    const int first = first_stored(work, tile) + head_of_group * static_cast<int>(args.tiles.in_matrix) + work.tile -
                      work.seen.keys_of(tile).begin;
    shared.pipeline.producer_acquire(state);
    ptx::Barrier& full = shared.pipeline.full[state.stage];
    shared.iterations[state.stage] = static_cast<int>(keys);
    ptx::arrive_expecting(full, __popc(keys) * kTileBytes + RightTile<kWidth>::kBytes);
#pragma unroll 1
    for (int w = 0; w < Traits::kWarpgroups; ++w) {
      if ((keys >> w & 1u) == 0) continue;
      ptx::copy_bytes(&shared.left[state.stage][w], stored + MaterialisedTiles::offset(first + w), kTileBytes, full);
    }
    copy_right<kWidth>(work, operand, tile, head_of_group);
    state.advance();
  }

  template <int kWidth>
  __device__ __forceinline__ void copy_right(const Work& work, const TmaDescriptor& operand, int tile,
                                             int head_of_group) {
    const int head = work.key_head * static_cast<int>(args.params.queries_per_key_head()) + head_of_group;
    reinterpret_cast<RightTile<kWidth>&>(shared.right[state.stage])
        .copy(operand.map, shared.pipeline.full[state.stage],
              {work.first_column, work.query_begin + tile * Traits::kRows, head * operand.head_step,
               work.batch * operand.batch_step});
  }
};

}  // namespace flash_attn_ext::sm90
