// Forward pass: O = softmax(score(Q K^T)) V and its LSE (Dao 2023, "FlashAttention-2", algorithm 1).
//
// Grid: one block a (batch, query head, tile of kQueries queries), tiles with the most keys first. Each warp owns
// kQueries / kWarps rows: S, P and O live in its registers, and P is used as an operand from there.
// Shared memory: Q, and one or two stages of a tile of K and one of V. With one, V is on its way while S = Q K^T is
// computed, and the next K while O += P V; with two, both of the next tile all along, and a tile has one barrier.
// Two blocks on a multiprocessor fill each other's waits. Key tiles outside the visible interval are never loaded, and
// only partial ones compare.
#pragma once

#include "attention/online_softmax.h"
#include "kernels/common/attention_rows.cuh"
#include "kernels/sm80/block.cuh"
#include "kernels/sm80/mask_coverage.cuh"
#include "kernels/sm80/score_tile.cuh"
#include "kernels/sm80/staged_terms.cuh"
#include "kernels/sm80/store_rows.cuh"
#include "kernels/tile_config.h"
#include "tile/gemm.h"

namespace flash_attn_ext::sm80 {

// The block's rows again. Takes nothing that the kernel would have to keep for it.
template <class Kernel>
__device__ __forceinline__ void forward_without_tensor_cores(const attention::ForwardParams& p,
                                                             const Schedule& schedule) {
  const QueryBlock block = query_block<Kernel>(p, schedule);
  const int64_t end = min(block.first_query + Kernel::kTile.queries, block.item.sequence.num_queries);
  const common::ColumnRange columns = {block.first_column, block.first_column + Kernel::kTile.columns};
  const common::HeadItem head = common::head_item(p, block.item.sequence, block.item.head);
  for (int64_t query = block.first_query + tile::warp(); query < end; query += Kernel::kTile.warps) {
    common::compute_forward_row<typename Kernel::Element>(p, head, query, columns);
  }
}

template <class Traits>
struct ForwardKernel {
  using Element = typename Traits::Element;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr QueryStationaryTile kTile = forward_tile(sizeof(Element), kHeadDim, Traits::kVariant);
  static constexpr int kThreads = kTile.warps * kWarpSize;
  static constexpr int kRowsPerWarp = kTile.queries / kTile.warps;
  // Few tiles raise a row's maximum. Where O fills most registers, asking first is faster than multiplying it by 1.
  static constexpr bool kSkipsRescaling = kRowsPerWarp == 32 && kTile.columns > 64;

  using Scores = tile::Accumulator<kRowsPerWarp / 16, kTile.keys / 8>;
  using Terms = std::conditional_t<Traits::kHasTerms, StagedTerms<Element, Scores>, NoTerms>;

  struct Shared {
    tile::SharedTile<Element, kTile.queries, kHeadDim> q;
    tile::SharedTile<Element, kTile.keys, kHeadDim> k[kTile.stages];
    tile::SharedTile<Element, kTile.keys, kTile.columns> v[kTile.stages];
    Terms terms[Traits::kHasTerms ? kTile.warps : 1];
  };

  using Output = tile::Accumulator<kRowsPerWarp / 16, kTile.columns / 8>;

  const attention::ForwardParams& p;
  const Schedule& schedule;
  Shared& shared;
  WorkItem item;
  int64_t first_query;
  int first_column;  // of V and O
  int num_keys;
  Output out;
  float m[Output::kThreadRows];  // largest score: of q.k (Plain) or of the finished score (Extended)
  float l[Output::kThreadRows];  // this thread's part of the sum of exp

  __device__ __forceinline__ int num_queries() const {
    return static_cast<int>(min(item.sequence.num_queries - first_query, int64_t{kTile.queries}));
  }

  // Committed with the first tile of keys.
  __device__ __forceinline__ void load_queries() {
    const int64_t row = item.sequence.query_begin + first_query;
    const auto* rows = p.q.row<const Element>(item.sequence.batch, item.head, row);
    tile::copy_rows_async<kThreads>(shared.q, {rows, p.q.row_stride, static_cast<int>(p.head_dim_qk)}, num_queries());
  }

  // Rows [tile * kTile.keys, ...) of K or V; `rows` is the head's first row.
  template <class Tile>
  __device__ __forceinline__ void load_keys(Tile& target, const tile::GlobalRows<Element>& rows, int tile) {
    const int first_key = tile * kTile.keys;
    tile::copy_rows_async<kThreads>(target, {rows.data + first_key * rows.stride, rows.stride, rows.columns},
                                    num_keys - first_key);
    ptx::commit_copies();
  }

  __device__ __forceinline__ void run() {
    const attention::Interval first = p.visibility.keys_of(first_query, item.sequence);
    const attention::Interval last = p.visibility.keys_of(first_query + num_queries() - 1, item.sequence);
    num_keys = static_cast<int>(item.sequence.num_keys);
    out.clear();
#pragma unroll
    for (int r = 0; r < Output::kThreadRows; ++r) {
      m[r] = -INFINITY;
      l[r] = 0.0f;
    }
    if (first.begin < last.end) stream(first, last);
    finish();
    // A NaN may be 0 times what nobody attends: such rows again, without tensor cores.
    if (__syncthreads_or(out.has_nan())) forward_without_tensor_cores<ForwardKernel>(p, schedule);
  }

  // Visits the key tiles that the block's first and last query see between them, from the last one down.
  __device__ __forceinline__ void stream(const attention::Interval& first, const attention::Interval& last) {
    const int64_t key_row = item.sequence.key_begin;
    const tile::GlobalRows<Element> k = {p.k.row<const Element>(item.sequence.batch, item.key_head, key_row),
                                         p.k.row_stride, static_cast<int>(p.head_dim_qk)};
    const tile::GlobalRows<Element> v = {
        p.v.row<const Element>(item.sequence.batch, item.key_head, key_row) + first_column, p.v.row_stride,
        static_cast<int>(p.head_dim_v) - first_column};
    const int first_tile = static_cast<int>(first.begin / kTile.keys);
    const int last_tile = static_cast<int>((last.end - 1) / kTile.keys);
    // Every query sees every key of tiles [full_begin, full_end): the last query begins last, the first ends first.
    const int full_begin = static_cast<int>((last.begin + kTile.keys - 1) / kTile.keys);
    const int full_end = static_cast<int>(first.end / kTile.keys);
    const auto coverage = [&](int tile) {
      return mask_coverage(p, item, {first_query, first_query + kTile.queries},
                           {int64_t{tile} * kTile.keys, int64_t{tile + 1} * kTile.keys});
    };
    const auto where_of = [&](int tile) {
      return ScoreTile<Rows::kQueries, Scores>{p, item, first_query + tile::warp() * kRowsPerWarp,
                                               int64_t{tile} * kTile.keys};
    };
    Terms& terms = shared.terms[Traits::kHasTerms ? tile::warp() : 0];
    const int end = first_tile - 1;
    Visit at = next_attended<-1, Traits::kHasTerms>(last_tile, end, coverage);
    if (at.tile == end) return;
    const int start = at.tile;
    load_queries();
    if constexpr (Traits::kHasTerms) terms.load(where_of(start), at.masked);
    load_keys(shared.k[0], k, start);
    load_keys(shared.v[0], v, start);
    int stage = 0;
    while (at.tile != end) {
      const auto where = where_of(at.tile);
      if (kTile.stages == 1 && at.tile == start) {
        ptx::wait_copies<1>();
        __syncthreads();  // Q and K have arrived
      } else {
        ptx::wait_copies<0>();
        __syncthreads();  // what is next has arrived, and what it replaces has no readers any more
        if constexpr (kTile.stages == 1) load_keys(shared.v[0], v, at.tile);
      }
      const Visit next = next_attended<-1, Traits::kHasTerms>(at.tile - 1, end, coverage);
      if constexpr (kTile.stages == 2) {
        if (next.tile != end) {
          load_keys(shared.k[1 - stage], k, next.tile);
          load_keys(shared.v[1 - stage], v, next.tile);
        }
      }
      Scores scores;
      scores.clear();
      tile::multiply_head_dims(scores, shared.q, tile::warp() * kRowsPerWarp, shared.k[stage]);
      if constexpr (kTile.stages == 1) {
        ptx::wait_copies<0>();
        __syncthreads();  // V has arrived, and K's readers are done
        if (next.tile != end) load_keys(shared.k[0], k, next.tile);
      }
      if constexpr (Traits::kHasTerms) {
        modify(scores, where, terms, at.masked);
        __syncwarp();  // the terms' readers are done
        if (next.tile != end) {
          terms.load(where_of(next.tile), next.masked);
          ptx::commit_copies();
        }
      }
      if (at.tile < full_begin || at.tile >= full_end) where.hide_invisible(scores);
      softmax(scores);
      if (drops()) {
        where.draw([&](int r, int j, int e, bool kept) {
          if (!kept) scores.at(r, j, e) = 0.0f;
        });
      }
      tile::multiply_registers(out, scores, shared.v[stage]);
      if constexpr (kTile.stages == 2) stage = 1 - stage;
      at = next;
    }
    ptx::wait_copies<0>();
  }

  // product -> score.
  template <class Tile>
  __device__ __forceinline__ void modify(Scores& scores, const Tile& where, const Terms& terms, bool masked) const {
    const attention::ScoreMod& mod = p.score_mod;
    const bool staged = Terms::stages(mod.bias);
    // The scale joins the bias's addition where nothing comes between them.
    const bool scaled_later = staged && (!Traits::kExtended || (mod.softcap == 0.0 && !mod.alibi.present()));
    if (!folds_scale() && !scaled_later) where.cap(scores);
    if (Traits::kExtended && mod.alibi.present()) where.add_alibi(scores);
    if (staged) {
      terms.add_bias(scores, scaled_later ? static_cast<float>(mod.scale) : 1.0f);
    } else if (Traits::kExtended && mod.bias.present()) {
      where.add_float32_bias(scores);
    }
    if (masked) terms.apply_mask(scores);
  }

  // exp(scale (x - m)) = 2^(c x - c m) saves a multiplication. Other scores may be as low as the smallest finite
  // number, so there the difference comes first.
  __device__ __forceinline__ bool folds_scale() const { return !Traits::kHasTerms || p.score_mod.only_scales(); }

  __device__ __forceinline__ bool drops() const {
    return Traits::kVariant == Variant::kDropout || (Traits::kExtended && p.dropout.enabled());
  }

  // scores -> P, with m, l and O brought up to date.
  __device__ __forceinline__ void softmax(Scores& scores) {
    const bool folded = folds_scale();
    const float c = folded ? static_cast<float>(p.score_mod.scale) * kLog2e : kLog2e;
    float raised[Scores::kThreadRows];
    bool any_raised = !kSkipsRescaling;
#pragma unroll
    for (int r = 0; r < Scores::kThreadRows; ++r) {
      float tile_max = scores.at(r, 0, 0);
#pragma unroll
      for (int j = 0; j < Scores::kColumnTiles; ++j) {
        tile_max = fmaxf(tile_max, fmaxf(scores.at(r, j, 0), scores.at(r, j, 1)));
      }
      raised[r] = fmaxf(m[r], tile::quad_max(tile_max));
      any_raised |= raised[r] != m[r];
    }
    if (!kSkipsRescaling || __any_sync(0xFFFFFFFFu, any_raised)) {
#pragma unroll
      for (int r = 0; r < Scores::kThreadRows; ++r) {
        const float factor = ptx::exp2((m[r] - (raised[r] == -INFINITY ? 0.0f : raised[r])) * c);
        m[r] = raised[r];
        l[r] *= factor;
        out.scale_row(r, factor);
      }
    }
#pragma unroll
    for (int r = 0; r < Scores::kThreadRows; ++r) {
      const float shift = m[r] == -INFINITY ? 0.0f : m[r];
      const float scaled_shift = shift * c;
      float tile_sum = 0.0f;  // on its own: beside a long row's sum, single terms would be rounded away
      const auto exponentiate = [&](auto&& exponent_of) {
#pragma unroll
        for (int j = 0; j < Scores::kColumnTiles; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& score = scores.at(r, j, e);
            score = ptx::exp2(exponent_of(score));
            tile_sum += score;
          }
        }
      };
      if (folded) {
        exponentiate([&](float score) { return score * c - scaled_shift; });
      } else {
        exponentiate([&](float score) { return (score - shift) * c; });
      }
      l[r] += tile_sum;
    }
  }

  // O / l and the LSE.
  __device__ __forceinline__ void finish() {
    const float scale = folds_scale() ? static_cast<float>(p.score_mod.scale) : 1.0f;
    const int first_row = tile::warp() * kRowsPerWarp;  // the warp's, in the tile
    const int rows = num_queries() - first_row;
    const int64_t row = item.sequence.query_begin + first_query + first_row;
    float* lse = p.lse.at<float>(item.sequence.batch, item.head, row);
    float* residual = p.lse_residual.at<float>(item.sequence.batch, item.head, row);
#pragma unroll
    for (int r = 0; r < Output::kThreadRows; ++r) {
      attention::SoftmaxState<float> state = {.m = m[r] * scale, .l = tile::quad_sum(l[r])};
      if (m[r] == -INFINITY) state.m = -INFINITY;  // whatever the sign of the scale
      float factor = p.sink == nullptr ? 1.0f : state.add_sink(static_cast<const float*>(p.sink)[item.head]);
      factor *= state.output_factor();
      if (drops()) factor *= static_cast<float>(p.dropout.rescale);
      out.scale_row(r, factor);
      if (Output::row(r) >= rows || first_column != 0 || tile::lane() % 4 != 0) continue;
      const attention::LogSumExp<float> result = state.log_sum_exp();
      lse[Output::row(r)] = result.value;
      if (p.lse_residual.present()) residual[Output::row(r)] = result.residual;
    }
    Element* target = p.out.row<Element>(item.sequence.batch, item.head, row) + first_column * p.out.column_stride;
    store_rows<Element>({.data = target,
                         .row_stride = p.out.row_stride,
                         .column_stride = p.out.column_stride,
                         .rows = rows,
                         .columns = static_cast<int>(p.head_dim_v) - first_column},
                        out, shared.q, first_row);
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kTile.blocks)
    forward_kernel(const __grid_constant__ attention::ForwardParams p, const __grid_constant__ Schedule schedule) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const QueryBlock block = query_block<Kernel>(p, schedule);
  if (block.first_query >= block.item.sequence.num_queries) return;
  Kernel kernel = {p,          schedule,          *reinterpret_cast<typename Kernel::Shared*>(shared_memory),
                   block.item, block.first_query, block.first_column};
  kernel.run();
}

}  // namespace flash_attn_ext::sm80
