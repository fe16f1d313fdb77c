// The epilogue of key tiles: where dK and dV go, and their sums over query chunks, over parts of a key tile and over
// the shares of a KV group.
#pragma once

#include "kernels/sm90/backward/key_stationary/traits.h"
#include "kernels/sm90/backward/partial_sums.cuh"
#include "kernels/sm90/staged_rows.cuh"
#include "ptx/global_memory.h"
#include "tile/sm90/register_order.h"

namespace flash_attn_ext::sm90 {

// Where a warp writes its 16 rows of dK and dV, and their non-finite flag.
template <class Traits>
struct KeyGradientRows {
  using Element = typename Traits::Element;

  const KeyStationaryArguments& args;
  const KeyTileWork& work;
  const int warpgroup;  // of the two key warpgroups

  __device__ __forceinline__ OutputRows<Element> dk() const { return rows(args.params.dk, args.params.head_dim_qk); }
  __device__ __forceinline__ OutputRows<Element> dv() const { return rows(args.params.dv, args.params.head_dim_v); }

  __device__ __forceinline__ uint8_t& nan_flag() const {
    const attention::BackwardParams& params = args.params;
    const int tiles = static_cast<int>(args.order.tiles);
    // Dense batch entries have all tiles, whatever a key bias hides.
    const int keys = Traits::kKeyBias && args.keys_before_padding != nullptr
                         ? static_cast<int>(params.sequences.max_seqlen_k)
                         : work.contributor.num_keys;
    const int behind = tiles - LoopOrder::num_tiles(keys, Traits::kKeys);
    const int64_t key_tile =
        common::flag_index(int64_t{work.key_head} * params.batch + work.batch, tiles, work.contributor.tile) + behind;
    constexpr int kWarps = 4 * Traits::kWarpgroups;
    return args.workspace.dkdv_nan_flags[key_tile * kWarps + warpgroup * 4 + tile::warp() % 4];
  }

 private:
  __device__ __forceinline__ OutputRows<Element> rows(const attention::MatrixView& to, int64_t columns) const {
    const int warp_row = warpgroup * tile::kWarpgroupRows + tile::warp() % 4 * 16;
    const int first_key = work.contributor.tile * Traits::kKeys + warp_row;
    return {.data = to.row<Element>(work.batch, work.key_head, work.key_begin + first_key),
            .row_stride = to.row_stride,
            .column_stride = to.column_stride,
            .rows = to.data == nullptr ? 0 : work.contributor.num_keys - first_key,
            .columns = static_cast<int>(columns)};
  }
};

// Partial dV and dK of a warpgroup's keys that one query chunk hands on to the next, in register order. Each share of a
// KV group, which is a pair of its own, has such sums.
template <class Traits>
struct ChunkSums {
  using Dk = tile::WarpgroupAccumulator<Traits::kDims.qk>;
  using Dv = tile::WarpgroupAccumulator<Traits::kDims.v>;
  using DkInMemory = tile::RegisterOrder<Dk>;
  using DvInMemory = tile::RegisterOrder<Dv>;
  static constexpr int kDvFloats = DvInMemory::kFloats;
  static constexpr int kFloats = kDvFloats + DkInMemory::kFloats;

  const KeyStationaryArguments& args;
  const typename Traits::Work& work;
  const int warpgroup;

  __device__ __forceinline__ float* of_warpgroup() const { return of_share(work.kv_group_share); }
  __device__ __forceinline__ float* of_share(int share) const {
    const int64_t tile = work.partial_sums + int64_t{share - work.kv_group_share} * args.order.tiles;
    return args.workspace.key_sums + (tile * Traits::kWarpgroups + warpgroup) * kFloats;
  }

  // Loads the sums of earlier chunks, or zeros where there are none.
  __device__ __forceinline__ void load(Dk& dk, Dv& dv) const {
    const float* const from = of_warpgroup();
    PartialSums<Dv>::load(dv, from, work.has_partial_sums);
    PartialSums<Dk>::load(dk, from + kDvFloats, work.has_partial_sums);
  }
  __device__ __forceinline__ void store(const Dk& dk, const Dv& dv) const {
    float* const to = of_warpgroup();
    PartialSums<Dv>::store(to, dv);
    PartialSums<Dk>::store(to + kDvFloats, dk);
  }
};

// Partial dK and dV of key tiles where each share of a KV group is a work tile of its own
// (LoopOrder::kv_group_shares).
template <class Traits>
struct KvGroupShareSums {
  const KeyStationaryArguments& args;
  const typename Traits::Work& work;
  const int warpgroup;

  __device__ __forceinline__ int partials() const { return static_cast<int>(args.order.kv_group_shares); }
  __device__ __forceinline__ int own_partial() const { return work.kv_group_share; }
  __device__ __forceinline__ int counter() const { return work.index; }
  // Where this thread's floats of a partial begin.
  __device__ __forceinline__ float* partial(int share) const {
    using Sums = ChunkSums<Traits>;
    if constexpr (Traits::kChunked) {
      return Sums{args, work, warpgroup}.of_share(share) + Sums::DvInMemory::own();
    } else {
      const int64_t tile = int64_t{work.index} * args.order.kv_group_shares + share;
      return args.workspace.key_sums + (tile * Traits::kWarpgroups + warpgroup) * Sums::kFloats +
             Sums::DvInMemory::own();
    }
  }
};

// The same where there is a mask: partials are those of all parts of a key tile (KeyTileParts), of one share after the
// other.
template <class Traits>
struct KeyTileSums {
  const KeyStationaryArguments& args;
  const MaskedKeyTileWork& work;
  const int warpgroup;

  __device__ __forceinline__ int partials() const { return work.partials; }
  __device__ __forceinline__ int own_partial() const { return work.partial; }
  __device__ __forceinline__ int counter() const { return work.arrivals; }
  __device__ __forceinline__ float* partial(int number) const {
    using Sums = ChunkSums<Traits>;
    const int64_t tile = int64_t{work.partial_sums} + number;
    return args.workspace.key_sums + (tile * Traits::kWarpgroups + warpgroup) * Sums::kFloats + Sums::DvInMemory::own();
  }
};

// Stores a work tile's partial dK and dV in memory and counts it. The last one to arrive, whichever it is, adds all
// partials of the key tile up, in their order, and gets true: dk and dv are then the sums, to be stored. So no CTA
// waits, and the sums are bitwise reproducible. Partials are in register order.
//
// Memory ordering between CTAs: a barrier orders the warpgroup's stores before one thread's addition to the counter.
// The addition releases these stores, and acquires those of earlier work tiles. Another barrier passes that on to the
// warpgroup. PTX ISA, "causality order".
template <class Traits, class Sums>
__device__ __forceinline__ bool combine_partials(const Sums& sums, typename ChunkSums<Traits>::Dk& dk,
                                                 typename ChunkSums<Traits>::Dv& dv, int& arrived) {
  using DkInMemory = typename ChunkSums<Traits>::DkInMemory;
  using DvInMemory = typename ChunkSums<Traits>::DvInMemory;
  const int partials = sums.partials();
  float* const own = sums.partial(sums.own_partial());
  DvInMemory::store(own, dv);
  DkInMemory::store(own + DvInMemory::kFloats, dk);
  sync_key_warpgroup(sums.warpgroup);
  if (DvInMemory::own() == 0) {
    int* const arrivals = sums.args.workspace.arrivals;
    arrived = ptx::add_releasing_acquiring(arrivals + sums.counter() * Traits::kWarpgroups + sums.warpgroup, 1);
  }
  sync_key_warpgroup(sums.warpgroup);
  if (uniform(arrived) + 1 < partials) return false;
  dk.clear();
  dv.clear();
  const auto load = [](const float4* from) { return __ldcg(from); };
#pragma unroll 1
  for (int i = 0; i < partials; ++i) {
    const float* const partial = sums.partial(i);
    DvInMemory::template load<true>(dv, partial, load);
    DkInMemory::template load<true>(dk, partial + DvInMemory::kFloats, load);
  }
  return true;
}

}  // namespace flash_attn_ext::sm90
