// Forward pass: O = softmax(score(Q K^T)) V and its LSE (Dao 2023, "FlashAttention-2", algorithm 1).
//
// Grid: one CTA per (batch, query head, query tile, slice of V's columns), longest tiles first. Each warp owns
// kTile.queries / kTile.warps rows: S, P and O live in its registers, and P is the left operand of the PV GEMM from
// there. Shared memory: Q, and one or two stages of K and V. With one stage, the load of V overlaps S = Q K^T, and the
// load of the next K overlaps O += P V. With two stages, the load of the next tile overlaps the whole iteration, which
// then needs only one barrier. The CTAs of an SM hide each other's latency. Key tiles outside the visible interval are
// never loaded, and only partly masked tiles compare positions.
#pragma once

#include "kernels/common/rows/attention_rows.cuh"
#include "kernels/config/sm80.h"
#include "kernels/config/sm80_forward.h"
#include "kernels/epilogue/store_rows.cuh"
#include "kernels/schedule/block.cuh"
#include "kernels/schedule/head_tiles.h"
#include "kernels/score/dropout.cuh"
#include "kernels/score/mask_coverage.cuh"
#include "kernels/score/score_mod.cuh"
#include "kernels/score/staging.cuh"
#include "kernels/sm80/forward/forward_rows.cuh"
#include "kernels/sm80/launch.cuh"
#include "kernels/sm80/sm80_kernels.h"
#include "tile/sm80/copy_rows.h"
#include "tile/sm80/gemm.h"

namespace flash_attn_ext::sm80 {

// Recomputes the warp's rows without tensor cores. It derives the work tile again, so that the mainloop holds no
// register for it.
template <class Kernel>
__device__ __forceinline__ void forward_without_tensor_cores(const ForwardParams& p, const Schedule& schedule) {
  const QueryBlock block = query_block<Kernel>(p, schedule);
  const int64_t begin = block.first_query + tile::warp() * Kernel::kRowsPerWarp;
  const int64_t end = min(begin + Kernel::kRowsPerWarp, block.coord.sequence.num_queries);
  const common::ColumnRange columns = {block.first_column, block.first_column + Kernel::kTile.columns};
  const common::HeadRows head = common::head_rows(p, block.coord.sequence, block.coord.head);
  for (int64_t query = begin; query < end; ++query) {
    common::compute_forward_row<typename Kernel::Element>(p, head, query, columns);
  }
}

template <class Traits>
struct ForwardKernel {
  using Element = typename Traits::Element;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr TileShape kTile = Traits::kConfig.tile;
  static constexpr int kThreads = kTile.warps * kWarpSize;
  static constexpr int kRowsPerWarp = kTile.queries / kTile.warps;
  static constexpr int kFewKeys = 16;  // a last tile with no more keys than this is narrow, where there are two stages
  static constexpr bool kCachesAddresses = Traits::kConfig.for_few_queries;  // where there is one stage
  using Index = std::conditional_t<kHeadDim <= 128, int, unsigned>;          // the type of indices in copies

  // The type in which intervals are computed. With 32 bits ptxas spills in kernels for few queries
  // (docs/kernels/log/sm80.md, "Types of positions").
  using Length = std::conditional_t<Traits::kConfig.for_few_queries, int64_t, int>;

  using WarpRows = ForwardRows<Traits>;
  using Scores = tile::Accumulator<kRowsPerWarp / 16, kTile.keys / 8>;
  using Where = ScoreTile<Rows::kQueries, Scores>;
  using BiasMask = std::conditional_t<Traits::kHasBiasMask, StagedBiasMask<Element, Where, true>, NoBiasMask>;

  using KTile = tile::SharedTile<Element, kTile.keys, kHeadDim>;
  using VTile = tile::SharedTile<Element, kTile.keys, kTile.columns>;

  struct Shared {
    tile::SharedTile<Element, kTile.queries, kHeadDim> q;
    KTile k[kTile.stages];
    VTile v[kTile.stages];
    BiasMask bias_mask[Traits::kHasBiasMask ? kTile.warps : 1];
  };

  const ForwardParams& p;
  const Schedule& schedule;
  Shared& shared;
  HeadCoord coord;
  int64_t first_query;
  int first_column;  // of the CTA's slice of V and O
  int num_keys;
  WarpRows rows;

  __device__ __forceinline__ int num_queries() const {
    return static_cast<int>(min(coord.sequence.num_queries - first_query, int64_t{kTile.queries}));
  }

  // Issues the copies of Q; they are committed with those of the first key tile.
  __device__ __forceinline__ void load_queries() {
    const int64_t row = coord.sequence.query_begin + first_query;
    const auto* rows = p.q.row<const Element>(coord.sequence.batch, coord.head, row);
    tile::copy_rows_async<kThreads, Index>(shared.q, {rows, p.q.row_stride, static_cast<int>(p.head_dim_qk)},
                                           num_queries());
  }

  __device__ __forceinline__ void run() {
    num_keys = static_cast<int>(coord.sequence.num_keys);
    attention::Interval first = {0, num_keys};
    attention::Interval last = first;
    if (!Traits::kConfig.for_few_queries || !p.visibility.unlimited()) {
      first = p.visibility.keys_of<Length>(first_query, coord.sequence);
      last = p.visibility.keys_of<Length>(first_query + num_queries() - 1, coord.sequence);
    }
    rows.clear();
    if (first.begin < last.end) {
      if (Traits::kConfig.unmasked_by_warp && first.end > 0)
        first.end = min(first.end + tile::warp() * kRowsPerWarp, int64_t{num_keys});
      const TileRange tiles = tile_range<kTile.keys>(first, last);
      if constexpr (kTile.stages == 2) {
        stream_ahead(tiles, static_cast<int>(last.end));
      } else {
        stream(tiles);
      }
    }
    rows.finish(coord, first_query, first_column, shared.q);
    // A NaN may be a weight of 0 times a NaN or infinity of a key that the row does not attend to. Such rows are
    // recomputed without tensor cores.
    if constexpr (Traits::kConfig.repairs_in_kernel) {
      if (__any_sync(0xFFFFFFFFu, rows.out.has_nan())) {
        __syncwarp();  // the rows are written
        forward_without_tensor_cores<ForwardKernel>(p, schedule);
      }
    } else {
      flag_nan<kTile.warps>(p.nan_flags, rows.out);
    }
  }

  // The rows of the head's K, and of the CTA's slice of its V.
  __device__ __forceinline__ tile::GlobalRows<Element> k_rows() const {
    return {p.k.row<const Element>(coord.sequence.batch, coord.key_head, coord.sequence.key_begin), p.k.row_stride,
            static_cast<int>(p.head_dim_qk)};
  }
  __device__ __forceinline__ tile::GlobalRows<Element> v_rows() const {
    return {p.v.row<const Element>(coord.sequence.batch, coord.key_head, coord.sequence.key_begin) + first_column,
            p.v.row_stride, static_cast<int>(p.head_dim_v) - first_column};
  }

  template <class Acc>
  __device__ __forceinline__ ScoreTile<Rows::kQueries, Acc> where_of(int tile) const {
    return {p, coord, first_query + tile::warp() * kRowsPerWarp, int64_t{tile} * kTile.keys};
  }

  // The mainloop in descending order of key tiles, with one stage of K and V.
  __device__ __forceinline__ void stream(const TileRange& tiles) {
    const tile::TileSource<kThreads, KTile, Index> k(k_rows(), num_keys);
    const tile::TileSource<kThreads, VTile, Index> v(v_rows(), num_keys);
    const int whole_k = ptx::pin(k.regular() ? num_keys / kTile.keys : 0);
    const int whole_v = ptx::pin(v.regular() ? num_keys / kTile.keys : 0);
    const auto load_k = [&](int tile) {
      k.template copy<kCachesAddresses>(shared.k[0], tile, whole_k);
      ptx::commit_copies();
    };
    const auto load_v = [&](int tile) {
      v.template copy<kCachesAddresses>(shared.v[0], tile, whole_v);
      ptx::commit_copies();
    };
    const auto coverage = [&](int tile) {
      return mask_coverage(p, coord, {first_query, first_query + kTile.queries},
                           {int64_t{tile} * kTile.keys, int64_t{tile + 1} * kTile.keys});
    };
    BiasMask& bias_mask = shared.bias_mask[Traits::kHasBiasMask ? tile::warp() : 0];
    const int end = tiles.begin - 1;
    MainloopTile at = next_unmasked<-1, Traits::kHasBiasMask>(tiles.end - 1, end, coverage);
    if (at.tile == end) return;
    const int start = at.tile;
    load_queries();
    if constexpr (Traits::kHasBiasMask) stage(bias_mask, where_of<Scores>(start), at.masked);
    load_k(start);
    load_v(start);
    while (at.tile != end) {
      const auto where = where_of<Scores>(at.tile);
      if (at.tile == start) {
        ptx::wait_copies<1>();
        __syncthreads();  // Q and K have arrived
      } else {
        ptx::wait_copies<0>();
        __syncthreads();  // K has arrived, and no warp reads V any more
        load_v(at.tile);
      }
      const MainloopTile next = next_unmasked<-1, Traits::kHasBiasMask>(at.tile - 1, end, coverage);
      Scores scores;
      scores.clear();
      tile::multiply_head_dims(scores, shared.q, tile::warp() * kRowsPerWarp, shared.k[0]);
      ptx::wait_copies<0>();
      __syncthreads();  // V has arrived, and no warp reads K any more
      if (next.tile != end) load_k(next.tile);
      if constexpr (Traits::kHasBiasMask) {
        modify<Traits::kGeneric>(scores, where, bias_mask, at.masked, rows.folds_scale());
        __syncwarp();  // no lane reads the bias and mask any more
        if (next.tile != end) {
          stage(bias_mask, where_of<Scores>(next.tile), next.masked);
          ptx::commit_copies();
        }
      }
      if (!tiles.full(at.tile)) where.hide_invisible(scores);
      rows.softmax(scores);
      if (rows.drops()) {
        draw_dropout(where, [&](int r, int j, int e, bool kept) {
          if (!kept) scores.at(r, j, e) = 0.0f;
        });
      }
      tile::multiply_registers(rows.out, scores, shared.v[0]);
      at = next;
    }
    ptx::wait_copies<0>();
  }

  // The mainloop with two stages, for scores that are only scaled. Keys from end_key on are masked.
  __device__ __forceinline__ void stream_ahead(const TileRange& tiles, int end_key) {
    const tile::TileSource<kThreads, KTile, Index> k(k_rows(), num_keys);
    const tile::TileSource<kThreads, VTile, Index> v(v_rows(), num_keys);
    const int whole = ptx::pin(k.regular() && v.regular() ? num_keys / kTile.keys : 0);
    // Vision transformers often have 197 or 257 keys, which leave few in the last tile.
    const int last = tiles.end - 1;
    const int narrow = ptx::pin(end_key - last * kTile.keys <= kFewKeys ? last : -1);
    const auto load = [&](int stage, int tile) {
      if (tile < whole) {
        k.copy_whole(shared.k[stage], tile);
        v.copy_whole(shared.v[stage], tile);
      } else {
        const int wanted = tile == narrow ? kFewKeys : kTile.keys;
        k.copy_some(shared.k[stage], tile, wanted);
        v.copy_some(shared.v[stage], tile, wanted);
      }
      ptx::commit_copies();
    };
    const int full_begin = ptx::pin(tiles.full_begin);
    const int full_end = ptx::pin(tiles.full_end);
    const int first = ptx::pin(tiles.begin);
    load_queries();
    load(0, last);
    int stage = 0;
    for (int tile = last; tile >= first; --tile) {
      ptx::wait_copies<0>();
      __syncthreads();  // this tile has arrived, and no warp reads the preceding one any more
      if (tile > first) load(stage ^ 1, tile - 1);
      if (tile == narrow) {
        attend<kFewKeys, true>(stage, tile);
      } else if (tile < full_begin || tile >= full_end) {
        attend<kTile.keys, true>(stage, tile);
      } else {
        attend<kTile.keys, false>(stage, tile);
      }
      stage ^= 1;
    }
  }

  // One iteration, with the first kKeys keys of a tile.
  template <int kKeys, bool kPartial>
  __device__ __forceinline__ void attend(int stage, int tile) {
    tile::Accumulator<kRowsPerWarp / 16, kKeys / 8> scores;
    scores.clear();
    tile::multiply_head_dims(scores, shared.q, tile::warp() * kRowsPerWarp,
                             shared.k[stage].template rows_from<kKeys>(0));
    if (kPartial) where_of<decltype(scores)>(tile).hide_invisible(scores);
    rows.softmax(scores);
    tile::multiply_registers(rows.out, scores, shared.v[stage]);
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kTile.ctas_per_sm)
    forward_kernel(const __grid_constant__ ForwardParams p, const __grid_constant__ Schedule schedule) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const QueryBlock block = query_block<Kernel>(p, schedule);
  if (block.first_query >= block.coord.sequence.num_queries) return;
  Kernel kernel = {p,
                   schedule,
                   *reinterpret_cast<typename Kernel::Shared*>(shared_memory),
                   block.coord,
                   block.first_query,
                   block.first_column,
                   0,
                   {p}};
  kernel.run();
}

template <class Element, int kHeadDim>
cudaError_t forward(const ForwardParams& p, const ForwardPlan& plan, cudaStream_t stream) {
  return with_row_of<kForwardConfigs, Element, kHeadDim>(plan.row, [&](auto row) {
    constexpr ForwardConfig kConfig = kForwardConfigs[row()];
    using Kernel = ForwardKernel<KernelTraits<Element, kConfig>>;
    const Schedule schedule = make_schedule(p, {.pairs = all_pairs(p),
                                                .order = forward_pair_order(p),
                                                .rows = Rows::kQueries,
                                                .tile_rows = Kernel::kTile.queries,
                                                .slices = num_slices(p.head_dim_v, Kernel::kTile.columns),
                                                .element_bytes = sizeof(Element),
                                                .l2_bytes = plan.l2_bytes});
    const cudaError_t error = launch<Kernel>(forward_kernel<Kernel>, p, schedule, stream);
    if (kConfig.repairs_in_kernel || error != cudaSuccess) return error;
    return common::repair_forward<InMemory<Element>>(p, flagged_rows<Kernel>(p.nan_flags, schedule), stream);
  });
}

}  // namespace flash_attn_ext::sm80
