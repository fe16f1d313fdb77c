// The thread that claims tiles of keys, says which queries see each one, and starts the copies of stored tiles and of
// what they are multiplied with.
#pragma once

#include "kernels/sm90/backward_wide/traits.h"
#include "ptx/bulk_copy.h"

namespace flash_attn_ext::sm90 {

template <class Traits>
struct ProductProducer {
  using Element = typename Traits::Element;
  using Shared = WideProductShared<Traits>;
  using Work = typename Shared::Work;

  const WideArguments& args;
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
    work.flags = (pair * static_cast<int>(args.schedule.tiles) + static_cast<int>(at.tile)) * kWideProductFlags;
    work.row = args.tiles.first_row(p, sequence, work.key_head, 0);
    TileRange all = {0, 0, 0, 0};
#pragma unroll 1
    for (int w = 0; w < Traits::kWarpgroups; ++w) {
      const TileRange own = work.seen.queries_of(work.tile + w);
      work.own[w] = own;
      all = joined(all, own);
    }
    work.begin = all.begin;
    work.end = all.end;
    return true;
  }

  // Of each tile of queries, the heads of a group one after the other.
  template <int kWidth>
  __device__ __forceinline__ void send(const Work& work, const OperandMap& operand, int64_t matrix) {
    using RightTile = typename Traits::template RightTile<kWidth>;
    constexpr int kTileBytes = static_cast<int>(ScoreTiles::kBytes);
    const auto group = static_cast<int>(args.params.queries_per_key_head());
    const SeenTiles seen = work.seen;
    const Element* const stored = static_cast<const Element*>(args.workspace.scores) + matrix;
#pragma unroll 1
    for (int tile = work.begin; tile < work.end; ++tile) {
      const TileRange keys = seen.keys_of(tile);
      const int first = max(keys.begin, work.tile);
      const int count = min(keys.end, work.tile + Traits::kWarpgroups) - first;
#pragma unroll 1
      for (int member = 0; member < group; ++member) {
        const int64_t row = work.row + int64_t{member} * args.tiles.rows + tile;
        const int head = work.key_head * group + member;
        shared.ring.wait_empty(at);
        ptx::Barrier& full = shared.ring.full[at.stage];
        ptx::arrive_expecting(full, count * kTileBytes + RightTile::kBytes);
        ptx::copy_bytes(&shared.left[at.stage][first - work.tile], stored + args.tiles.offset(row, first, keys.begin),
                        count * kTileBytes, full);
        reinterpret_cast<RightTile&>(shared.right[at.stage])
            .copy(operand.map, full,
                  {0, work.query_begin + tile * Traits::kRows, head * operand.head_step,
                   work.batch * operand.batch_step});
        at.advance();
      }
    }
  }
};

}  // namespace flash_attn_ext::sm90
