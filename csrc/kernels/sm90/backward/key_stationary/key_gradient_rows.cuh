// Where a warp writes its 16 rows of dK and dV, and their non-finite flag.
#pragma once

#include "kernels/sm90/backward/key_stationary/traits.h"
#include "kernels/sm90/store_row_lines.cuh"

namespace flash_attn_ext::sm90 {

template <class Traits>
struct KeyGradientRows {
  using Element = typename Traits::Element;

  const BackwardArguments& args;
  const KeyTileWork& work;
  const int warpgroup;  // of the two key warpgroups

  __device__ __forceinline__ OutputRows<Element> dk() const { return rows(args.params.dk, args.params.head_dim_qk); }
  __device__ __forceinline__ OutputRows<Element> dv() const { return rows(args.params.dv, args.params.head_dim_v); }

  // Flags are in the order of a schedule of keys, one head after the other (schedule/block.cuh).
  __device__ __forceinline__ uint8_t& nan_flag() const {
    const attention::BackwardParams& params = args.params;
    const int tiles = static_cast<int>(args.order.tiles);
    const int behind = tiles - LoopOrder::num_tiles(work.contributor.num_keys, Traits::kKeys);
    const int64_t key_tile =
        (int64_t{work.key_head} * params.batch + work.batch) * tiles + work.contributor.tile + behind;
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

}  // namespace flash_attn_ext::sm90
