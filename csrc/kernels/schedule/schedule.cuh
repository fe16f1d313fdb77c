// Block index -> (pair, head of its group, tile of rows, slice of columns). A pair is a batch entry and a key head.
// Where blocks share what a tile sees, blockIdx.y is their part.
//
// The host prepares the divisions as multiplications: they would be a tenth of a short sequence's instructions.
//
// Pairs are counted head-major, pair = key head * batch + batch entry: what a head's batch entries share, such as a
// bias, is used by blocks that run together, and a launch can hold all of it. Heads that are worked on together come
// tile by tile, all of them at one tile before any is at the next: a section. One head at a time keeps what streams
// past its tiles in L2. Where tiles differ in work (causal attention, windows, a last tile of fewer rows), as many
// heads as L2 holds let a launch end on the least of it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/divisor.h"
#include "attention/even_share.h"
#include "attention/params.h"

namespace flash_attn_ext {

using attention::Divisor;

enum class Rows { kQueries, kKeys };  // what the rows of a tile are

struct Place {
  uint32_t batch;
  uint32_t key_head;
  uint32_t head_of_group;  // 0 where a block owns rows of keys
  uint32_t tile;           // from the last rows on
  uint32_t slice;
};

struct Schedule {
  uint32_t num_blocks;
  uint32_t first_pair;
  uint32_t tiles;  // of a head
  uint32_t group;  // query heads of a key head
  Divisor batch;
  Divisor slices;    // blocks that share a tile
  Divisor heads;     // of a pair: its query heads, or 1
  Divisor together;  // heads that are worked on together
  Divisor rest;      // the same of the last section
  Divisor section;   // tiles of the other sections
  uint32_t num_sections;
  bool ascends;    // from the first rows on
  uint32_t parts;  // blocks that share what a tile sees: launches have num_blocks x parts

  FLASH_HOST_DEVICE Place place(uint32_t block) const {
    const uint32_t index = slices.quotient(block);
    const uint32_t in_section_of = std::min(section.quotient(index), num_sections - 1);
    const uint32_t in_section = index - in_section_of * section.divisor;
    const Divisor& count = in_section_of + 1 == num_sections ? rest : together;
    const uint32_t tile = count.quotient(in_section);
    const uint32_t head = in_section_of * together.divisor + in_section - tile * count.divisor;
    const uint32_t pair = heads.quotient(head);
    const uint32_t key_head = batch.quotient(first_pair + pair);
    return {.batch = first_pair + pair - key_head * batch.divisor,
            .key_head = key_head,
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

// What a launch divides among its blocks.
struct Division {
  Pairs pairs;
  Rows rows;  // what a block owns tile_rows of
  int tile_rows;
  int64_t slices;     // blocks that share a tile
  int64_t parts = 1;  // likewise: each sees a part of what the tile does
  int64_t element_bytes;
  int64_t l2_bytes;              // of the device
  int64_t smaller_sections = 1;  // how many times smaller than the last section the others are
  // Where all tiles see the same, but the last one has fewer rows: heads of which these may come together, last.
  int64_t uneven_heads = 1;
};

// No blocks where there is nothing to do, or more than a grid holds (num_blocks is then UINT32_MAX, which a launch
// refuses).
inline Schedule make_schedule(const attention::AttentionParams& p, const Division& of) {
  const bool queries = of.rows == Rows::kQueries;
  const int64_t group = p.queries_per_key_head();
  const int64_t heads_of_pair = queries ? group : 1;
  const int64_t heads = of.pairs.count * heads_of_pair;
  const int64_t length = queries ? p.sequences.max_seqlen_q : p.sequences.max_seqlen_k;
  const int64_t tiles = (length + of.tile_rows - 1) / of.tile_rows;
  const int64_t blocks = heads * tiles * of.slices;
  if (blocks == 0 || blocks > INT32_MAX) return {.num_blocks = blocks == 0 ? 0 : UINT32_MAX};
  // Five eighths of L2 for what streams past tiles; the rest is for what the tiles read and write once. A packed batch
  // by its average length: a launch of one of its heads ends on few long sequences, which costs more than L2 misses.
  const bool packed = p.sequences.cu_seqlens_q != nullptr;
  const int64_t budget = packed && of.pairs.count <= p.batch ? of.l2_bytes : of.l2_bytes * 5 / 8;
  const int64_t dense_rows = queries ? p.sequences.max_seqlen_k : p.sequences.max_seqlen_q;
  const int64_t head_rows = packed ? (queries ? p.sequences.total_k : p.sequences.total_q) / p.batch : dense_rows;
  // In a window, what a tile sees: those that are worked on together see much the same.
  const int64_t streamed_rows = std::min(head_rows, p.visibility.left + p.visibility.right + of.tile_rows);
  const int64_t streamed = std::max<int64_t>(streamed_rows * (p.head_dim_qk + p.head_dim_v) * of.element_bytes, 1);
  const bool all_see_the_same = p.visibility.unlimited();
  const bool ascends = all_see_the_same && !packed && of.uneven_heads > 1 && length % of.tile_rows != 0;
  const int64_t in_l2 = std::clamp(budget / streamed, int64_t{1}, heads);
  const int64_t most = !all_see_the_same ? in_l2 : ascends ? std::min(in_l2, of.uneven_heads) : 1;
  const int64_t last = attention::even_share(heads, most);
  const int64_t most_before = all_see_the_same ? int64_t{1} : std::max<int64_t>(last / of.smaller_sections, 1);
  const int64_t together = attention::even_share(heads - last, most_before);
  const int64_t sections = (heads - last + together - 1) / together;  // before the last one
  const auto divisor = [](int64_t n) { return Divisor::of(static_cast<uint32_t>(n)); };
  return {.num_blocks = static_cast<uint32_t>(blocks),
          .first_pair = static_cast<uint32_t>(of.pairs.first),
          .tiles = static_cast<uint32_t>(tiles),
          .group = static_cast<uint32_t>(group),
          .batch = divisor(p.batch),
          .slices = divisor(of.slices),
          .heads = divisor(heads_of_pair),
          .together = divisor(together),
          .rest = divisor(heads - sections * together),
          .section = divisor(together * tiles),
          .num_sections = static_cast<uint32_t>(sections + 1),
          .ascends = ascends,
          .parts = static_cast<uint32_t>(of.parts)};
}

}  // namespace flash_attn_ext
