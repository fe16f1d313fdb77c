// Query heads that share a key head as rows of the same tiles (FlashAttention-3's PackGQA), in Hopper's forward kernels
// for caches and few queries: K and V are loaded once for all of them, and few queries fill a tile. Row
// `query * count + head` belongs to that query, and to packed head `head`.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/params.h"

namespace flash_attn_ext::attention {

// Whether the TMA can write O: contiguous rows of 16-byte chunks, with 16-bit elements. A plan that is only described
// has no O, which then counts as writable.
inline bool tma_writes_out(const BasicForwardParams& p) {
  const MatrixView& out = p.out;
  if (out.data == nullptr) return p.head_dim_v % 8 == 0;
  const bool is_aligned = reinterpret_cast<uintptr_t>(out.data) % 16 == 0;
  return is_aligned && out.column_stride == 1 &&
         (p.head_dim_v | out.batch_stride | out.head_stride | out.row_stride) % 8 == 0;
}

// How many heads are packed: the largest power of two, up to the 16 rows of a warp, that divides the heads of a KV
// group. So a box of the TMA has whole queries; of a group of 6 heads 2 are packed, of one of 7 none. Above head dim
// 128 O is not stored by the TMA, and heads are not packed.
inline int64_t num_packed_heads(const BasicForwardParams& p) {
  constexpr int64_t kMost = 16, kMostHeadDim = 128, kMostRows = int64_t{1} << 30;
  const int64_t group = p.queries_per_key_head();
  if (group <= 1 || p.sequences.cu_seqlens_q != nullptr || p.q.head_stride == 0 || !tma_writes_out(p)) return 1;
  if (std::max(p.head_dim_qk, p.head_dim_v) > kMostHeadDim) return 1;
  const int64_t count = std::min(group & -group, kMost);
  return p.sequences.max_seqlen_q <= kMostRows / count ? count : 1;
}

// The call whose queries are packed rows: `count` times the queries, and 1 / `count` of the heads.
template <class Params>
Params with_packed_heads(Params p) {
  const int64_t count = num_packed_heads(p);
  p.num_heads_q /= count;
  p.sequences.max_seqlen_q *= count;
  return p;
}

}  // namespace flash_attn_ext::attention
