// The end of a tile: O / l and the LSE of a warp's 16 rows.
#pragma once

#include "kernels/sm90/forward/row_softmax.cuh"
#include "kernels/sm90/forward_all_keys/traits.h"
#include "kernels/sm90/send_rows.cuh"

namespace flash_attn_ext::sm90 {

// Of the warps that compute.
__device__ __forceinline__ int result_warp() { return tile::warp() - tile::kWarpgroupSize / tile::kWarpSize; }

// The calling warp's first row of a tile of a unit's queries.
__device__ __forceinline__ int own_row(int query_tile) {
  return query_tile * tile::kWarpgroupRows + tile::warp() % 4 * 16;
}

__device__ __forceinline__ uint8_t* nan_flag(const AllKeysArguments& args, const Unit& unit, int query_tile) {
  return args.nan_flags + (int64_t{unit.number} * args.query_tiles + query_tile) * 4 + tile::warp() % 4;
}

// Where a warp's rows go: what is left of a unit once its stage is given back.
struct ResultRows {
  int batch;
  int head;
  int row;    // of the tensors
  int count;  // that exist, or more than 16
  uint8_t* nan_flag;
};

__device__ __forceinline__ ResultRows result_rows(const AllKeysArguments& args, const Unit& unit, int query_tile) {
  const attention::Sequence& sequence = unit.item.sequence;
  const int first = unit.first_query + own_row(query_tile);
  return {.batch = static_cast<int>(sequence.batch),
          .head = static_cast<int>(unit.item.head),
          .row = static_cast<int>(sequence.query_begin) + first,
          .count = static_cast<int>(sequence.num_queries) - first,
          .nan_flag = nan_flag(args, unit, query_tile)};
}

// Whether something in the warp's rows is not finite.
template <class Traits>
__device__ __forceinline__ bool store_result(const AllKeysArguments& args, const ResultRows& rows,
                                             typename Traits::Output& out, const RowSoftmax& softmax,
                                             typename Traits::OutTile& staging) {
  using Element = typename Traits::Element;
  const attention::ForwardParams& p = args.params;
  const auto scale = static_cast<float>(p.score_mod.scale);
  const int own = tile::lane() % 4;  // the thread of a quad that writes the LSE of this row
  attention::SoftmaxState<float> own_state;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    attention::SoftmaxState<float> state = softmax.state_of(r, scale);
    float factor = p.sink == nullptr ? 1.0f : state.add_sink(static_cast<const float*>(p.sink)[rows.head]);
    factor *= state.l == 0.0f ? 0.0f : ptx::reciprocal(state.l);
    out.scale_row(r, factor);
    if (r == own) own_state = state;
  }
  const int own_row = Traits::Output::row(own);
  if (own < 2 && own_row < rows.count) {
    *p.lse.at<float>(rows.batch, rows.head, rows.row + own_row) =
        own_state.log_sum_exp([](float x) { return ptx::log(x); }).value;
  }
  const OutputRows<Element> target = {.data = p.out.row<Element>(rows.batch, rows.head, rows.row),
                                      .row_stride = p.out.row_stride,
                                      .column_stride = p.out.column_stride,
                                      .rows = rows.count,
                                      .columns = static_cast<int>(p.head_dim_v)};
  if (tile::lane() == 0) ptx::wait_until_read();  // of the tile before
  __syncwarp();
  const ptx::BoxOrigin at = {.column = 0, .row = rows.row, .head = rows.head, .batch = rows.batch};
  return __any_sync(0xFFFFFFFFu, send_rows(target, args.out, at, out, staging, tile::warp() % 4 * 16));
}

}  // namespace flash_attn_ext::sm90
