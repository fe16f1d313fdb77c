// The epilogue of a work tile: O / l and the LSE of a warp's 16 rows, and which rows are recomputed.
#pragma once

#include "kernels/common/rows/attention_rows.cuh"
#include "kernels/epilogue/store_quads.cuh"
#include "kernels/schedule/block.cuh"
#include "kernels/sm90/forward/key_bias_writer.cuh"
#include "kernels/sm90/forward/packed_rows.cuh"
#include "kernels/sm90/forward/row_softmax.cuh"
#include "kernels/sm90/forward/traits.h"
#include "kernels/sm90/kernel.cuh"
#include "kernels/sm90/staged_rows.cuh"

namespace flash_attn_ext::sm90 {

// Rows with a non-finite result are recomputed without tensor cores, since the result may be 0 times a NaN or infinity
// of a key that the row does not attend to.

// The flag of the calling warp's rows of a tile.
template <class Traits>
__device__ __forceinline__ uint8_t& warp_flag(const TileFlags& flags, int tile) {
  return flags.flags[int64_t{tile} * Traits::kWarps + tile::warp() - tile::kWarpgroupSize / tile::kWarpSize];
}

// Whether stores of the calling warp's rows of a work tile are enabled. When the work tile is recomputed, only flagged
// rows are stored, so that the result of a warp's rows depends on no other warp's.
template <class Traits, Rescale kRescale>
__device__ __forceinline__ bool is_store_enabled(const TileFlags& flags, int tile) {
  if constexpr (!Traits::kKeepsFirstMaximum || kRescale == Rescale::kNever) return true;
  return uniform(warp_flag<Traits>(flags, tile)) != 0;
}

// Sets or clears the flag of the calling warp's rows. This kernel recomputes rows whose sum left the range of
// Rescale::kNever; repair_flagged repairs those that are not finite even then, or inexact.
template <class Traits, Rescale kRescale>
__device__ __forceinline__ void flag_rows(const TileFlags& flags, int tile, Repair repair, int& any_flagged) {
  if (tile::lane() == 0) {
    warp_flag<Traits>(flags, tile) = static_cast<uint8_t>(repair);
    if (kRescale == Rescale::kNever && repair != Repair::kNone) *const_cast<volatile int*>(&any_flagged) = 1;
  }
  __syncwarp();
}

// Recomputes one row of a work tile. Not inlined: finding rows in a cache takes registers that other code needs.
template <class Traits>
__device__ __noinline__ void recompute_row_of_cache(const typename Traits::Arguments& args, int tile, int row) {
  const attention::BasicForwardParams& p = args.params;
  const Place at = args.schedule.place(static_cast<uint32_t>(tile));
  const attention::Sequence sequence = p.sequence_of(at.batch);
  const int packed = static_cast<int>(first_query_of(args.schedule, at, Traits::kQueries)) + row;
  const int query = query_of<Traits>(args, packed);
  if (query >= sequence.num_queries) return;
  const int64_t head = first_head_of<Traits>(args, at) + packed_head_of<Traits>(args, packed);
  const int first_column = static_cast<int>(at.slice) * kColumns;
  common::compute_forward_row<typename Traits::Element, common::AnyKeys>(
      args.params, common::head_rows(p, sequence, head), query, {first_column, first_column + kColumns});
}

// Recomputes one row of a work tile that has a key bias.
template <class Traits>
__device__ __noinline__ void recompute_row_beside_bias(const typename Traits::Arguments& args,
                                                       const common::HeadRows& head, int64_t query) {
  common::compute_forward_row<typename Traits::Element, common::OwnKeysWithBias>(args.params, head, query, {});
}

// With a key bias, a bit for each of the calling warp's rows of a flagged work tile that has to be recomputed. first:
// the first row, which exists.
template <class Traits>
__device__ __noinline__ uint32_t rows_to_recompute(const typename Traits::Arguments& args, const common::HeadRows& head,
                                                   int tile, int64_t first) {
  if (static_cast<Repair>(warp_flag<Traits>(args.flags, tile)) != Repair::kInexactScores) return 0xFFFFFFFFu;
  const attention::Sequence& sequence = head.sequence;
  const int64_t first_of_tile = first / Traits::kQueries * Traits::kQueries;
  const attention::Interval keys = args.params.visibility.keys_of_tile(
      {first_of_tile, min(first_of_tile + Traits::kQueries, sequence.num_queries)}, sequence);
  constexpr int kKeys = Traits::kConfig.block_n;
  const int last = static_cast<int>(keys.end - 1) / kKeys;
  float largest = -INFINITY;  // of the last tile of keys
  for (int key = last * kKeys + tile::lane(); key < min((last + 1) * kKeys, static_cast<int>(sequence.num_keys));
       key += tile::kWarpSize) {
    largest = fmaxf(largest, common::load_bias<float>(args.params.score_mod.bias, {sequence.batch, head.head, 0, key}));
  }
  const float maximum = find_key_bias_maximum<Traits>(args, {sequence, head.head, head.key_head},
                                                      {static_cast<int>(keys.begin) / kKeys, last}, largest);
  attention::StatisticView row_max = {};
  if constexpr (Traits::kConfig.row_max) row_max = args.params.row_max;
  const attention::Interval rows = {first, min(first + 16, sequence.num_queries)};
  return repair_statistics<typename Traits::Element>(args.params, row_max, head, rows, {maximum, kMostFromMaximum});
}

// Recomputes the calling warp's flagged rows of all work tiles that its CTA had. last_tile: the last of these;
// first_row: the warp's first row in a tile.
template <class Traits>
__device__ __forceinline__ void repair_flagged(const typename Traits::Arguments& args, int last_tile, int first_row) {
  constexpr int kRows = 16;
  const attention::BasicForwardParams& p = args.params;
  [[maybe_unused]] uint32_t rows = 0;  // with a key bias: a bit for each row of the tile that is recomputed
  // A single loop, so that what the rows of a tile share takes no registers while a row is computed.
#pragma unroll 1
  for (int tile = last_tile, row = 0; tile >= 0;) {
    if (row == kRows || warp_flag<Traits>(args.flags, tile) == 0) {
      tile = args.flags.previous[tile];
      row = 0;
      continue;
    }
    if constexpr (Traits::kConfig.kv_cache) {
      recompute_row_of_cache<Traits>(args, tile, first_row + row++);
      continue;
    }
    const Place at = args.schedule.place(static_cast<uint32_t>(tile));
    const attention::Sequence sequence = p.sequences.at(at.batch);
    const common::HeadRows head = common::head_rows(p, sequence, at.key_head * args.schedule.group + at.head_of_group);
    const int first_column = static_cast<int>(at.slice) * kColumns;
    const int64_t query = first_query_of(args.schedule, at, Traits::kQueries) + first_row + row++;
    if (query >= sequence.num_queries) continue;
    if constexpr (Traits::kConfig.has_key_bias()) {
      if (row == 1) rows = rows_to_recompute<Traits>(args, head, tile, query);
      if ((rows >> (row - 1) & 1) == 0) continue;
    }
    const common::ColumnRange columns = {first_column, first_column + kColumns};
    if constexpr (Traits::kConfig.has_key_bias()) {
      recompute_row_beside_bias<Traits>(args, head, query);
    } else {
      common::compute_forward_row<typename Traits::Element>(args.params, head, query, columns);
    }
  }
}

// What is known about a thread's two rows before the last PV GEMM is complete.
struct RowEnds {
  float l[2];            // sums of exp, relative to the row maximum
  float kept[2];         // the share of l that dropout keeps
  float total[2];        // l with the sink, relative to the larger of row maximum and sink
  float factor[2];       // rescales l to the maximum of total
  bool needs_recompute;  // whether a sum left its range
  bool is_inexact;       // with a key bias: whether scores have lost digits
};

template <class Traits>
struct ForwardEpilogue {
  using Element = typename Traits::Element;
  using Output = typename Traits::Output;
  // Whether anything but a positive scale may change a score.
  static constexpr bool kMayModify = Traits::kConfig.modifies_scores() || Traits::kConfig.has_bias_or_mask();

  const typename Traits::Arguments& args;
  const typename ForwardShared<Traits>::Work& work;
  const int first_row;                  // the warp's, in the tile of queries
  const float key_bias_maximum = 0.0f;  // that was subtracted from the biases

  // The warp's first query, or row of packed heads.
  __device__ __forceinline__ int64_t query() const { return int64_t{work.first_query} + first_row; }
  __device__ __forceinline__ int num_rows() const {
    return static_cast<int>(min(num_rows_of<Traits>(args, work.coord.sequence) - query(), int64_t{16}));
  }
  // The query and the head of the warp's row r.
  __device__ __forceinline__ int64_t query_of_row(int r) const {
    return query_of<Traits>(args, static_cast<int>(query()) + r);
  }
  __device__ __forceinline__ int64_t head_of_row(int r) const {
    return work.coord.head + packed_head_of<Traits>(args, r);
  }

  // Writes the LSE and row_max, where stores are enabled. hides_row(r): whether the mask hides every key that the
  // thread had of a row; store() combines the threads' votes. A row that sees nothing has a sum of 0, and is not
  // recomputed. With kNever its maximum is -inf only if the warpgroup saw no tile.
  template <Rescale kRescale, class HidesRow>
  __device__ __forceinline__ RowEnds end_rows(const typename Traits::Softmax& softmax, bool store_enabled,
                                              HidesRow&& hides_row) const {
    const attention::BasicForwardParams& p = args.params;
    const attention::Sequence& sequence = work.coord.sequence;
    const int rows = num_rows();
    const bool folded = !kMayModify || p.score_mod.only_scales();
    const float scale = folded ? static_cast<float>(p.score_mod.scale) : 1.0f;
    const int own = tile::lane() % 4;  // the thread of a quad that writes the LSE of this row
    attention::SoftmaxState<float> own_state;
    float own_maximum = 0.0f;
    RowEnds ends;
    ends.needs_recompute = false;
    ends.is_inexact = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      ends.l[r] = tile::quad_sum(softmax.l[r]);
      if constexpr (Traits::kConfig.may_drop()) ends.kept[r] = tile::quad_sum(softmax.kept[r]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float l = ends.l[r];
      if (kRescale == Rescale::kNever && !(l > kLeastSum && l < kLargestSum)) {
        const bool sees_nothing =
            l == 0.0f && (softmax.m[r] == -INFINITY || is_out_of_sight(query() + Output::row(r)) || hides_row(r));
        ends.needs_recompute |= exists(r, rows) && !sees_nothing;
      }
      // A row that sees no key has the sink itself as its LSE.
      const float maximum = l == 0.0f ? 0.0f : key_bias_maximum;
      if constexpr (Traits::kConfig.has_key_bias()) {
        const float m = softmax.m[r] * scale;
        const bool is_far = m < -kMostFromMaximum || (maximum == 0.0f && m > kMostFromMaximum);
        ends.is_inexact |= is_far && m != -INFINITY && exists(r, rows);
        ends.needs_recompute |= m > attention::kMostScore && exists(r, rows);
      }
      attention::SoftmaxState<float> state = {.m = l == 0.0f ? -INFINITY : softmax.m[r] * scale, .l = l};
      if constexpr (Traits::kConfig.may_pack_heads()) {
        const auto* const sink = static_cast<const float*>(p.sink);
        ends.factor[r] = sink == nullptr ? 1.0f : state.add_sink(sink[head_of_row(Output::row(r))]);
      } else {
        ends.factor[r] =
            p.sink == nullptr ? 1.0f : state.add_sink(static_cast<const float*>(p.sink)[work.coord.head] - maximum);
      }
      ends.total[r] = state.l;
      if (r == own) {
        own_state = state;
        own_maximum = maximum;
      }
    }
    float own_row_max = 0.0f;
    if constexpr (Traits::kConfig.row_max) {
      const float row_max = softmax.template own_row_max<kRescale>(scale);
      own_row_max = (own % 2 == 0 ? ends.l[0] : ends.l[1]) == 0.0f ? -INFINITY : row_max;
      if constexpr (Traits::kConfig.has_key_bias()) own_row_max += own_maximum;
    }
    const int own_row = Output::row(own);
    if (store_enabled && own < 2 && own_row < rows && work.first_column == 0) {
      const int64_t row = sequence.query_begin + query() + own_row;
      attention::LogSumExp<float> result = own_state.log_sum_exp([](float x) { return ptx::log(x); });
      if constexpr (Traits::kConfig.has_key_bias()) result = result.plus(own_maximum);
      if constexpr (Traits::kConfig.may_pack_heads()) {
        *p.lse.at<float>(sequence.batch, head_of_row(own_row), query_of_row(own_row)) = result.value;
      } else {
        *p.lse.at<float>(sequence.batch, work.coord.head, row) = result.value;
      }
      if ((kMayModify || Traits::kConfig.has_key_bias()) && p.lse_residual.present()) {
        *p.lse_residual.at<float>(sequence.batch, work.coord.head, row) = result.residual;
      }
      if constexpr (Traits::kConfig.row_max) {
        const attention::StatisticView& row_max = args.params.row_max;
        if (row_max.present()) *row_max.at<float>(sequence.batch, work.coord.head, row) = own_row_max;
      }
    }
    return ends;
  }

  // Returns whether the rows need to be recomputed: a sum left the range that the first tile's maximum allows, or 0 was
  // multiplied by a NaN or infinity. staging: the warpgroup's rows of Q, which no GEMM reads any more, or null where no
  // key is visible.
  __device__ __forceinline__ bool store(Output& out, const RowEnds& ends, const typename Traits::RowSums& sums,
                                        typename Traits::QTile* staging) const {
    const attention::BasicForwardParams& p = args.params;
    const attention::Sequence& sequence = work.coord.sequence;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float factor = ends.factor[r];
      const float total = ends.total[r];
      if constexpr (Traits::kConfig.rounded_sums && Traits::kConfig.may_drop()) {
        const float kept = sums.at(r);
        const float unrounded = kept > 0.0f ? ends.kept[r] * ptx::reciprocal(kept) : 1.0f;
        factor *= total == 0.0f ? 0.0f : ptx::reciprocal(total) * unrounded;
      } else if constexpr (Traits::kConfig.rounded_sums) {
        // The sink's share of the sum was not rounded.
        const float rounded = total - ends.l[r] * factor + sums.at(r) * factor;
        factor *= total == 0.0f ? 0.0f : ptx::reciprocal(rounded);
      } else {
        factor *= total == 0.0f ? 0.0f : ptx::reciprocal(total);
      }
      if (Traits::kConfig.may_drop() && p.dropout.enabled()) factor *= static_cast<float>(p.dropout.rescale);
      out.scale_row(r, factor);
    }
    const int64_t row = sequence.query_begin + query();
    OutputRows<Element> target = {
        .data = p.out.row<Element>(sequence.batch, work.coord.head, row) + work.first_column * p.out.column_stride,
        .row_stride = p.out.row_stride,
        .column_stride = p.out.column_stride,
        .rows = num_rows(),
        .columns = static_cast<int>(p.head_dim_v) - work.first_column};
    bool needs_recompute = ends.needs_recompute;
    if constexpr (!Traits::kConfig.tma_store) {
      needs_recompute |= store_row_quads<Element>(target, out);
    } else if (!Traits::kConfig.may_pack_heads() && staging == nullptr) {
      store_zeros(target);
    } else {
      ptx::TmaCoordinate at = {.column = work.first_column,
                               .row = static_cast<int>(row),
                               .head = static_cast<int>(work.coord.head),
                               .batch = static_cast<int>(sequence.batch)};
      // The TMA writes O of packed heads as it reads Q (ForwardProducer::copy_packed_q). Heads are only packed where it
      // can (num_packed_heads()). It leaves out rows after the last query, because the tensor ends there.
      if (Traits::kConfig.may_pack_heads() && args.log2_packed_heads > 0) {
        at.row = static_cast<int>(work.coord.head);
        at.head = static_cast<int>(query_of_row(0));
        target.rows = OutputMap::kRows;
      }
      needs_recompute |= tma_store_rows(target, args.out, at, out, *staging, first_row % tile::kWarpgroupRows);
    }
    return __any_sync(0xFFFFFFFFu, needs_recompute);
  }

  // The same for one split of the rows' keys, which common/sums/combine.h combines. O is scaled so that the exact sums
  // are its divisor.
  template <Rescale kRescale>
  __device__ __forceinline__ bool store_partial(Output& out, const typename Traits::Softmax& softmax,
                                                const typename Traits::RowSums& sums) const {
    const KvSplits& splits = args.kv_splits;
    const int rows = num_rows();
    const int64_t tile = work.coord.sequence.batch * splits.tiles + work.first_query / Traits::kQueries;
    const int log2_packed = Traits::kConfig.may_pack_heads() ? args.log2_packed_heads : 0;
    const int64_t head = (tile * args.params.num_heads_q + work.coord.head) >> log2_packed;
    const int64_t work_tile = head * splits.column_slices + work.first_column / kColumns;
    const auto slot = static_cast<int>(work_tile * splits.count + work.split);
    bool needs_recompute = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float l = tile::quad_sum(softmax.l[r]);
      // Also of a row that sees nothing of the split.
      if (kRescale == Rescale::kNever) needs_recompute |= exists(r, rows) && !(l > kLeastSum && l < kLargestSum);
      const float m = l == 0.0f ? -INFINITY : softmax.m[r] * static_cast<float>(args.params.score_mod.scale);
      if constexpr (Traits::kConfig.rounded_sums) {
        const float rounded = sums.at(r);
        out.scale_row(r, l == 0.0f ? 0.0f : l * ptx::reciprocal(rounded));
      }
      if (exists(r, rows) && tile::lane() % 4 == 0) {
        splits.rows.state_of(slot, first_row + Output::row(r)) = {m, l};
      }
    }
    float* const target = splits.rows.out_row(slot, first_row) + Output::column(0, 0);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float zero = 0.0f;
      float* const row = target + Output::row(r) * splits.rows.columns;
#pragma unroll
      for (int j = 0; j < Output::kColumnTiles; ++j) {
        zero = fmaf(out.at(r, j, 0), 0.0f, fmaf(out.at(r, j, 1), 0.0f, zero));
        if (exists(r, rows)) *reinterpret_cast<float2*>(row + 8 * j) = {out.at(r, j, 0), out.at(r, j, 1)};
      }
      needs_recompute |= exists(r, rows) && zero != 0.0f;
    }
    return __any_sync(0xFFFFFFFFu, needs_recompute);
  }

 private:
  __device__ __forceinline__ static bool exists(int r, int rows) { return Output::row(r) < rows; }

  // Whether causality or a window hides every key from a query.
  __device__ __forceinline__ bool is_out_of_sight(int64_t query) const {
    const int64_t own = Traits::kConfig.may_pack_heads() ? query_of<Traits>(args, static_cast<int>(query)) : query;
    return args.params.visibility.template keys_of<int>(own, work.coord.sequence).empty();
  }
};

}  // namespace flash_attn_ext::sm90
