// Rows of tiles in kernels that may pack heads (attention/packed_heads.h). In other kernels rows are queries.
#pragma once

#include "kernels/sm90/forward/traits.h"

namespace flash_attn_ext::sm90 {

template <class Traits>
__device__ __forceinline__ int query_of(const typename Traits::Arguments& args, int row) {
  if constexpr (Traits::kConfig.may_pack_heads()) return row >> args.log2_packed_heads;
  return row;
}

// The row's index among the packed heads.
template <class Traits>
__device__ __forceinline__ int packed_head_of(const typename Traits::Arguments& args, int row) {
  if constexpr (Traits::kConfig.may_pack_heads()) return row & ((1 << args.log2_packed_heads) - 1);
  return 0;
}

template <class Traits>
__device__ __forceinline__ int64_t num_rows_of(const typename Traits::Arguments& args,
                                               const attention::Sequence& sequence) {
  if constexpr (Traits::kConfig.may_pack_heads()) return sequence.num_queries << args.log2_packed_heads;
  return sequence.num_queries;
}

// The head of a work tile, or the first one of packed heads.
template <class Traits>
__device__ __forceinline__ int64_t first_head_of(const typename Traits::Arguments& args, const Place& at) {
  const uint32_t head = at.key_head * args.schedule.group + at.head_of_group;
  if constexpr (Traits::kConfig.may_pack_heads()) return head << args.log2_packed_heads;
  return head;
}

template <class Traits>
__device__ __forceinline__ attention::Sequence sequence_of(const typename Traits::Arguments& args, int64_t batch) {
  if constexpr (Traits::kConfig.kv_cache) return args.params.sequence_of(batch);
  return args.params.sequences.at(batch);
}

// Sets scores that are masked by position to -inf. where.first_row is a row.
template <class Traits>
__device__ __forceinline__ void hide_invisible(const typename Traits::Arguments& args,
                                               const typename Traits::Where& where, typename Traits::Scores& scores) {
  using Scores = typename Traits::Scores;
  if constexpr (!Traits::kConfig.may_pack_heads()) {
    where.hide_invisible(scores);
  } else {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = static_cast<int>(where.first_row) + Scores::row(r);
      const attention::Interval keys =
          where.p.visibility.template keys_of<int>(query_of<Traits>(args, row), where.coord.sequence);
      const int begin = static_cast<int>(keys.begin - where.first_column) - Scores::column(0, 0);
      const auto count = static_cast<unsigned>(max(static_cast<int>(keys.end - keys.begin), 0));
#pragma unroll
      for (int j = 0; j < Scores::kColumnTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (static_cast<unsigned>(8 * j + e - begin) >= count) scores.at(r, j, e) = -INFINITY;
        }
      }
    }
  }
}

}  // namespace flash_attn_ext::sm90
