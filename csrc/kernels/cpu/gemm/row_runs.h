// Finds the rows of a sequence's keys by position, wherever they lie: in a tensor, in a cache's entry, or in pages.
#pragma once

#include <algorithm>

#include "attention/params.h"
#include "kernels/cpu/gemm/operand.h"

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

}  // namespace flash_attn_ext::cpu
