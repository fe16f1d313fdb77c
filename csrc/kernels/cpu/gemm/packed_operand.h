// K and V of a group of heads, converted or transposed once and read by many work tiles. The rows of a sequence's keys
// are found by position, wherever they lie: in a tensor, in a cache's entry, or in pages.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "attention/params.h"
#include "kernels/config/cpu.h"
#include "kernels/cpu/gemm/operand.h"
#include "kernels/cpu/schedule/work_queue.h"

namespace flash_attn_ext::cpu {

// Positions of one head of a sequence.
struct Positions {
  attention::Sequence sequence;
  int64_t head;
  attention::Interval range;

  int64_t count() const { return range.end - range.begin; }
};

// Whether neighbouring positions may lie in rows that are not neighbours.
inline bool scattered(const attention::AttentionParams& p) { return p.cache.present() && p.cache.paged(); }

// The longest run of neighbouring rows from range.begin on.
inline RowRange first_run(const attention::AttentionParams& p, const Positions& positions) {
  const attention::KeyRow at = p.key_row(positions.sequence, positions.range.begin);
  if (!scattered(p)) return {at.entry, positions.head, at.row, positions.count()};
  return {at.entry, positions.head, at.row, std::min(p.cache.page_size.divisor - at.row, positions.count())};
}

// Calls function(rows, first) for every run of neighbouring rows; the run's first row is at position range.begin +
// first.
template <class Function>
void for_each_run(const attention::AttentionParams& p, const Positions& positions, Function&& function) {
  Positions rest = positions;
  while (!rest.range.empty()) {
    const RowRange rows = first_run(p, rest);
    function(rows, rest.range.begin - positions.range.begin);
    rest.range.begin += rows.count;
  }
}

// Returns the rows in place if they can be read there, and otherwise converts them into scratch (count x columns).
template <class Real>
Block<const Real> load_positions(const attention::AttentionParams& p, const Operand& operand,
                                 const Positions& positions, Real* scratch) {
  if (!scattered(p)) return load_rows<Real>(operand, first_run(p, positions), scratch);
  for_each_run(p, positions, [&](const RowRange& rows, int64_t first) {
    convert_rows<Real>(operand, rows, scratch + first * operand.columns);
  });
  return {scratch, operand.columns};
}

enum class Form { kRows, kTransposed };  // (rows x columns) or (columns x rows) tiles

// Key heads, numbered batch * num_heads_k + head. A key head's query heads are neighbours, so a range of key heads is a
// range of query heads too.
struct HeadRange {
  int64_t begin;
  int64_t end;
};

template <class Real>
class PackedOperand {
 public:
  PackedOperand(const attention::AttentionParams& params, const Operand& operand, Form form);

  // Bytes that one key head takes.
  int64_t bytes_per_key_head() const;

  // Packs these heads, in parallel. It overwrites what was packed before.
  void load(const HeadRange& key_heads);

  // Tile `tile` (rows [tile * kStreamedRows, ...)) of a head that was loaded. Transposed tiles are zero-padded to the
  // next multiple of kClipRows.
  Block<const Real> tile(int64_t batch, int64_t head, int64_t tile) const;

  // Whether the tile, of Form::kRows, holds neither NaN nor infinity.
  bool finite(int64_t batch, int64_t head, int64_t tile) const { return finite_[slot(batch, head, tile)] != 0; }

 private:
  int64_t tile_elements() const { return tile_rows_ * operand_.columns; }
  int64_t slot(int64_t batch, int64_t head, int64_t tile) const {
    return (batch * p_.num_heads_k + head - first_head_) * num_tiles_ + tile;
  }
  void load_tile(int64_t slot);
  Block<const Real> load_rows_of(const Positions& positions, Real* target) const;
  Positions positions(int64_t batch, int64_t head, int64_t tile) const;

  const attention::AttentionParams& p_;
  Operand operand_;
  Form form_;
  bool in_place_;           // rows are read in place
  int64_t num_tiles_;       // of the longest sequence
  int64_t tile_rows_;       // that there is memory for; short sequences need no whole tile
  int64_t first_head_ = 0;  // of those loaded
  Scratch<Real> storage_;
  std::vector<uint8_t> finite_;
};

// Whether the keys of a head fit one tile. Each thread then packs the keys of its current head itself. They stay in its
// cache, and packing takes no longer than waiting until all heads are packed.
bool one_tile_of_keys(const attention::AttentionParams& params);

// Divides key heads [0, batch * num_heads_k) into groups whose packed operands stay under kPackedBytes. A group has at
// least one head.
std::vector<HeadRange> head_groups(const attention::AttentionParams& params, int64_t bytes_per_key_head);

}  // namespace flash_attn_ext::cpu
