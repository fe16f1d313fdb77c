// The thread that claims tiles of keys, says which queries see each one, and starts the copies of stored tiles and of
// what they are multiplied with.
#pragma once

#include "kernels/sm90/backward_storing/attended_keys.cuh"
#include "kernels/sm90/backward_storing/traits.h"
#include "ptx/bulk_copy.h"

namespace flash_attn_ext::sm90 {

template <class Traits>
struct ProductProducer {
  using Element = typename Traits::Element;
  using Shared = StoringProductShared<Traits>;
  using Work = typename Shared::Work;

  const StoringArguments& args;
  Shared& shared;
  typename decltype(Shared::ring)::Position at{};
  typename decltype(Shared::work_ring)::Position work_at{};

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (uint32_t index = blockIdx.x; index < args.schedule.num_blocks; index = claim()) {
      shared.work_ring.wait_empty(work_at);
      Work& work = shared.work[work_at.stage];
      if (!describe(work, index)) continue;
      ptx::arrive(shared.work_ring.full[work_at.stage]);
      if (work.is_dk) {
        send<Traits::kDims.qk>(work, args.q, args.tiles.between);
      } else {
        send<Traits::kDims.v>(work, args.dout, 0);
      }
      work_at.advance();
    }
    shared.work_ring.wait_empty(work_at);
    shared.work[work_at.stage].batch = Work::kEnd;
    ptx::arrive(shared.work_ring.full[work_at.stage]);
  }

 private:
  __device__ __forceinline__ uint32_t claim() const { return gridDim.x + atomicAdd(args.claims, 1u); }

  // False: the sequence has no such tile.
  __device__ __forceinline__ bool describe(Work& work, uint32_t index) const {
    const attention::BackwardParams& p = args.params;
    const Place at = args.schedule.place(index);
    const attention::Sequence sequence = p.sequences.at(at.batch);
    const auto first = static_cast<int>(first_key_of(args.schedule, at, Traits::kKeys, sequence.num_keys));
    if (first < 0) return false;
    work.batch = static_cast<int>(at.batch);
    work.key_head = static_cast<int>(at.key_head);
    work.is_dk = args.wanted.dk && at.slice == 0;
    work.query_begin = static_cast<int>(sequence.query_begin);
    work.key_begin = static_cast<int>(sequence.key_begin);
    work.seen = SeenTiles::of(p.visibility, sequence);
    work.tile = first / Traits::kRows;
    // In the order of a schedule of all keys, one head after the other (schedule/block.cuh).
    const int pair = work.key_head * static_cast<int>(p.batch) + work.batch;
    work.flags = (pair * static_cast<int>(args.schedule.tiles) + static_cast<int>(at.tile)) * Traits::kTile.flags();
    const int key_tile = first_key_tile(work, sequence) + first / Traits::kKeys;
    work.sums = key_tile * args.wanted.count() + static_cast<int>(at.slice);
    work.stored = args.tiles.first_of_head(p, sequence, work.key_head, 0);
    work.row = ScoreTiles::first_row(p, sequence);
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

  // Among those of key_sums: a packed sequence begins at a tile of its own.
  __device__ __forceinline__ int first_key_tile(const Work& work, const attention::Sequence& sequence) const {
    const bool packed = args.params.sequences.cu_seqlens_q != nullptr;
    const int matrix = args.tiles.matrix(args.params, sequence, work.key_head);
    const int first = packed ? static_cast<int>(sequence.key_begin) / Traits::kKeys + work.batch : 0;
    return matrix * args.workspace.key_tiles_of_matrix + first;
  }

  static constexpr int kTileBytes = static_cast<int>(ScoreTiles::kBytes);
  template <int kWidth>
  using RightTile = typename Traits::template RightTile<kWidth>;

  // Of each tile of queries, the heads of a group one after the other. matrix: where P or dS begins.
  template <int kWidth>
  __device__ __forceinline__ void send(const Work& work, const OperandMap& operand, int64_t matrix) {
    const Element* const stored = static_cast<const Element*>(args.workspace.scores) + matrix;
    if constexpr (Traits::kSkipsTiles) {
      send_attended<kWidth>(work, operand, stored);
    } else {
      send_all<kWidth>(work, operand, stored);
    }
  }

  template <int kWidth>
  __device__ __forceinline__ void send_all(const Work& work, const OperandMap& operand, const Element* stored) {
    const auto group = static_cast<int>(args.params.queries_per_key_head());
    const SeenTiles seen = work.seen;
#pragma unroll 1
    for (int tile = work.begin; tile < work.end; ++tile) {
      const TileRange keys = seen.keys_of(tile);
      const int first = max(keys.begin, work.tile);
      const int count = min(keys.end, work.tile + Traits::kWarpgroups) - first;
      int stored_tile = first_stored(work, tile) + first - keys.begin;
#pragma unroll 1
      for (int member = 0; member < group; ++member) {
        shared.ring.wait_empty(at);
        ptx::Barrier& full = shared.ring.full[at.stage];
        ptx::arrive_expecting(full, count * kTileBytes + RightTile<kWidth>::kBytes);
        ptx::copy_bytes(&shared.left[at.stage][first - work.tile], stored + ScoreTiles::offset(stored_tile),
                        count * kTileBytes, full);
        copy_right<kWidth>(work, operand, tile, member);
        stored_tile += static_cast<int>(args.tiles.in_matrix);
        at.advance();
      }
    }
  }

  // Of a tile of queries of the group's first head.
  __device__ __forceinline__ int first_stored(const Work& work, int tile) const {
    return work.stored + args.tiles.before(work.row + tile);
  }

  // Where a mask may leave tiles out: what was stored. Several visits are looked up at once.
  template <int kWidth>
  __device__ __forceinline__ void send_attended(const Work& work, const OperandMap& operand, const Element* stored) {
    constexpr int kBatch = 4;
    constexpr int kBits = 8;
    static_assert(kBatch * kBits <= 32 && Traits::kWarpgroups <= kBits);
    const auto group = static_cast<int>(args.params.queries_per_key_head());
    int tile = work.begin;
    int member = 0;
    const auto advance = [group](int& of_tile, int& of_member) {
      of_member = of_member + 1 == group ? 0 : of_member + 1;
      of_tile += of_member == 0;
    };
#pragma unroll 1
    while (tile < work.end) {
      uint32_t visits = 0;
      int tile_ahead = tile;
      int member_ahead = member;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (tile_ahead < work.end) visits |= stored_keys(work, tile_ahead, member_ahead) << (kBits * i);
        advance(tile_ahead, member_ahead);
      }
#pragma unroll 1
      for (int i = 0; i < kBatch; ++i) {
        const uint32_t keys = visits >> (kBits * i) & ((1u << kBits) - 1);
        if (keys != 0) {
          send_stored<kWidth>(work, operand, stored, tile, member, keys);
        }
        advance(tile, member);
      }
    }
    shared.ring.wait_empty(at);
    shared.visits[at.stage] = Shared::kEnd;
    ptx::arrive(shared.ring.full[at.stage]);
    at.advance();
  }

  // Which of the block's tiles of keys the dQ kernel met, as bits.
  __device__ __forceinline__ uint32_t stored_keys(const Work& work, int tile, int member) const {
    const auto group = static_cast<int>(args.params.queries_per_key_head());
    const TileRange keys = work.seen.keys_of(tile);
    const MaskTileRow row =
        MaskTileRow::of(args.params.score_mod.mask_tiles, work.batch, work.key_head * group + member, tile);
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
  __device__ __forceinline__ void send_stored(const Work& work, const OperandMap& operand, const Element* stored,
                                              int tile, int member, uint32_t keys) {
    const int first = first_stored(work, tile) + member * static_cast<int>(args.tiles.in_matrix) + work.tile -
                      work.seen.keys_of(tile).begin;
    shared.ring.wait_empty(at);
    ptx::Barrier& full = shared.ring.full[at.stage];
    shared.visits[at.stage] = static_cast<int>(keys);
    ptx::arrive_expecting(full, __popc(keys) * kTileBytes + RightTile<kWidth>::kBytes);
#pragma unroll 1
    for (int w = 0; w < Traits::kWarpgroups; ++w) {
      if ((keys >> w & 1u) == 0) continue;
      ptx::copy_bytes(&shared.left[at.stage][w], stored + ScoreTiles::offset(first + w), kTileBytes, full);
    }
    copy_right<kWidth>(work, operand, tile, member);
    at.advance();
  }

  template <int kWidth>
  __device__ __forceinline__ void copy_right(const Work& work, const OperandMap& operand, int tile, int member) {
    const int head = work.key_head * static_cast<int>(args.params.queries_per_key_head()) + member;
    reinterpret_cast<RightTile<kWidth>&>(shared.right[at.stage])
        .copy(operand.map, shared.ring.full[at.stage],
              {0, work.query_begin + tile * Traits::kRows, head * operand.head_step, work.batch * operand.batch_step});
  }
};

}  // namespace flash_attn_ext::sm90
