// Maps a CTA's index to (pair, head of its KV group, tile of rows, slice of columns). A pair is a batch entry and a key
// head. Where several CTAs share what a tile sees, blockIdx.y is the split.
//
// The host prepares the divisions as multiplications, because divisions would be a noticeable share of a short
// sequence's instructions (docs/kernels/log/sm80_forward.md, "What worked").
//
// Pairs are counted in head-major order, pair = key head * batch + batch entry, or in entry-major order, pair = batch
// entry * key heads + key head. In the first, CTAs that run together use what a head's batch entries share, such as a
// bias, and a launch can hold all of it. In the second, they read neighbours in memory where the layout is (batch,
// tokens, heads, head dim).
//
// The heads of an L2 head group are worked on together, all of them at one tile before any is at the next. One head at
// a time keeps what streams past its tiles in L2. Where tiles differ in work (causality, windows, intervals, a last
// tile of fewer rows), a group has as many heads as L2 holds, so that a launch ends on the smallest tiles.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/division.h"
#include "attention/params.h"

namespace flash_attn_ext {

using attention::Divisor;

enum class Rows { kQueries, kKeys };  // what the rows of a tile are
enum class PairOrder { kHeadMajor, kEntryMajor };

struct Place {
  uint32_t batch;
  uint32_t key_head;
  uint32_t head_of_group;  // 0 where a CTA owns rows of keys
  uint32_t tile;           // in longest-first order; first_query_of and first_key_of turn it into rows
  uint32_t slice;
};

struct Schedule {
  uint32_t num_blocks;
  uint32_t first_pair;
  uint32_t tiles;            // of a head
  uint32_t group;            // query heads of a KV group
  Divisor inner;             // batch entries of a key head, or key heads of a batch entry
  Divisor slices;            // CTAs that share a tile
  Divisor heads;             // of a pair: its query heads, or 1
  Divisor together;          // heads of an L2 head group
  Divisor rest;              // heads of the last group
  Divisor head_group_tiles;  // tiles of each of the other groups
  uint32_t num_head_groups;
  PairOrder order;
  bool ascends;     // tiles come from the first rows on
  uint32_t splits;  // CTAs that share what a tile sees: a launch has num_blocks x splits of them

  FLASH_HOST_DEVICE Place place(uint32_t block) const {
    const uint32_t index = slices.quotient(block);
    const uint32_t in_head_group_of = std::min(head_group_tiles.quotient(index), num_head_groups - 1);
    const uint32_t in_head_group = index - in_head_group_of * head_group_tiles.divisor;
    const Divisor& count = in_head_group_of + 1 == num_head_groups ? rest : together;
    const uint32_t tile = count.quotient(in_head_group);
    const uint32_t head = in_head_group_of * together.divisor + in_head_group - tile * count.divisor;
    const uint32_t pair = heads.quotient(head);
    const uint32_t outer_index = inner.quotient(first_pair + pair);
    const uint32_t inner_index = first_pair + pair - outer_index * inner.divisor;
    const bool entry_major = order == PairOrder::kEntryMajor;
    return {.batch = entry_major ? outer_index : inner_index,
            .key_head = entry_major ? inner_index : outer_index,
            .head_of_group = head - pair * heads.divisor,
            .tile = ascends ? tiles - 1 - tile : tile,
            .slice = block - index * slices.divisor};
  }
};

// The pairs of a launch.
struct Pairs {
  int64_t first;
  int64_t count;
};

inline Pairs all_pairs(const attention::AttentionParams& p) { return {0, p.batch * p.num_heads_k}; }

// What a launch divides among its CTAs.
struct Division {
  Pairs pairs;
  PairOrder order = PairOrder::kHeadMajor;
  Rows rows;  // a CTA owns tile_rows of these
  int tile_rows;
  int64_t slices;      // CTAs that share a tile
  int64_t splits = 1;  // CTAs that share a tile, each of which sees a split of what the tile does
  int64_t element_bytes;
  int64_t l2_bytes;                 // of the device
  int64_t smaller_head_groups = 1;  // how many times smaller than the last L2 head group the others are
  // Where all tiles see the same, but the last one has fewer rows: of how many heads these last tiles may be scheduled
  // together, at the end.
  int64_t uneven_heads = 1;
};

// The order of a forward pass (docs/kernels/log/sm90.md, "The order of heads").
inline PairOrder forward_pair_order(const attention::AttentionParams& p) {
  const attention::BroadcastView& bias = p.score_mod.bias;
  const bool shares_bias = bias.present() && bias.batch_stride == 0 && bias.head_stride != 0;
  return shares_bias ? PairOrder::kHeadMajor : PairOrder::kEntryMajor;
}

// num_blocks is 0 where there is nothing to do. It is UINT32_MAX, which a launch refuses, where a grid cannot hold the
// CTAs.
inline Schedule make_schedule(const attention::AttentionParams& p, const Division& of) {
  const bool queries = of.rows == Rows::kQueries;
  const int64_t group = p.queries_per_key_head();
  const int64_t heads_of_pair = queries ? group : 1;
  const int64_t heads = of.pairs.count * heads_of_pair;
  const int64_t length = queries ? p.sequences.max_seqlen_q : p.sequences.max_seqlen_k;
  const int64_t tiles = attention::ceil_div(length, of.tile_rows);
  const int64_t blocks = heads * tiles * of.slices;
  if (blocks == 0 || blocks > INT32_MAX) return {.num_blocks = blocks == 0 ? 0 : UINT32_MAX};
  // Five eighths of L2 are for what streams past tiles; the rest is for what tiles read and write once
  // (docs/kernels/log/sm80.md, "The L2 budget"). A packed batch counts with its average length. A launch with one head
  // of it may use all of L2: with smaller head groups it would end on few long sequences, which costs more than L2
  // misses.
  const bool packed = p.sequences.cu_seqlens_q != nullptr;
  const int64_t budget = packed && of.pairs.count <= p.batch ? of.l2_bytes : of.l2_bytes * 5 / 8;
  const int64_t dense_rows = queries ? p.sequences.max_seqlen_k : p.sequences.max_seqlen_q;
  const int64_t head_rows = packed ? (queries ? p.sequences.total_k : p.sequences.total_q) / p.batch : dense_rows;
  // In a window only what a tile sees counts, because tiles that are worked on together see much the same.
  const int64_t streamed_rows = std::min(head_rows, p.visibility.left + p.visibility.right + of.tile_rows);
  const int64_t streamed = std::max<int64_t>(streamed_rows * (p.head_dim_qk + p.head_dim_v) * of.element_bytes, 1);
  const bool all_see_the_same = p.visibility.unlimited() && !p.score_mod.selects_keys();
  const bool ascends = all_see_the_same && !packed && of.uneven_heads > 1 && length % of.tile_rows != 0;
  const int64_t in_l2 = std::clamp(budget / streamed, int64_t{1}, heads);
  const int64_t most = !all_see_the_same ? in_l2 : ascends ? std::min(in_l2, of.uneven_heads) : 1;
  const int64_t last = attention::even_share(heads, most);
  const int64_t most_before = all_see_the_same ? int64_t{1} : std::max<int64_t>(last / of.smaller_head_groups, 1);
  const int64_t together = attention::even_share(heads - last, most_before);
  const int64_t head_groups = attention::ceil_div(heads - last, together);  // before the last one
  const auto divisor = [](int64_t n) { return Divisor::of(static_cast<uint32_t>(n)); };
  return {.num_blocks = static_cast<uint32_t>(blocks),
          .first_pair = static_cast<uint32_t>(of.pairs.first),
          .tiles = static_cast<uint32_t>(tiles),
          .group = static_cast<uint32_t>(group),
          .inner = divisor(of.order == PairOrder::kEntryMajor ? p.num_heads_k : p.batch),
          .slices = divisor(of.slices),
          .heads = divisor(heads_of_pair),
          .together = divisor(together),
          .rest = divisor(heads - head_groups * together),
          .head_group_tiles = divisor(together * tiles),
          .num_head_groups = static_cast<uint32_t>(head_groups + 1),
          .order = of.order,
          .ascends = ascends,
          .splits = static_cast<uint32_t>(of.splits)};
}

}  // namespace flash_attn_ext
