#include "kernels/cpu/products/packed_operand.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "kernels/cpu/rows/row_ops.h"
#include "kernels/cpu/tiles.h"

namespace flash_attn_ext::cpu {

template <class Real>
PackedOperand<Real>::PackedOperand(const attention::AttentionParams& params, const Operand& operand, Side side,
                                   Form form)
    : p_(params),
      operand_(operand),
      side_(side),
      form_(form),
      in_place_(form == Form::kRows && !scattered(params, side) && operand.readable_in_place<Real>()),
      num_heads_(side == Side::kQueries ? params.num_heads_q : params.num_heads_k),
      num_heads_k_(params.num_heads_k) {
  const int64_t longest = side == Side::kQueries ? params.sequences.max_seqlen_q : params.sequences.max_seqlen_k;
  num_tiles_ = (longest + kStreamedRows - 1) / kStreamedRows;
  tile_rows_ = std::min(kStreamedRows, num_tiles(longest, kClipRows) * kClipRows);
}

template <class Real>
int64_t PackedOperand<Real>::bytes_per_key_head() const {
  if (in_place_) return 0;
  return heads_per_key_head() * num_tiles_ * tile_elements() * static_cast<int64_t>(sizeof(Real));
}

template <class Real>
void PackedOperand<Real>::load(const HeadRange& key_heads) {
  first_head_ = key_heads.begin * heads_per_key_head();
  const int64_t num_slots = (key_heads.end - key_heads.begin) * heads_per_key_head() * num_tiles_;
  if (!in_place_) storage_.reserve(num_slots * tile_elements());
  finite_.resize(num_slots);
  at::parallel_for(0, num_slots, 1, [&](int64_t begin, int64_t end) {
    for (int64_t slot = begin; slot < end; ++slot) load_tile(slot);
  });
}

template <class Real>
Positions PackedOperand<Real>::positions(int64_t batch, int64_t head, int64_t tile) const {
  const attention::Sequence sequence = p_.sequence_of(batch);
  const int64_t length = side_ == Side::kQueries ? sequence.num_queries : sequence.num_keys;
  const int64_t begin = tile * kStreamedRows;
  return {side_, sequence, head, {begin, std::min(begin + kStreamedRows, length)}};
}

template <class Real>
void PackedOperand<Real>::load_tile(int64_t slot) {
  const int64_t head_index = first_head_ + slot / num_tiles_;
  const Positions tile = positions(head_index / num_heads_, head_index % num_heads_, slot % num_tiles_);
  if (tile.range.empty()) return;
  const bool transposed = form_ == Form::kTransposed;
  const Block<const Real> loaded = load_rows_of(tile, in_place_ ? nullptr : storage_.data() + slot * tile_elements());
  const int64_t num_rows = transposed ? operand_.columns : tile.count();
  const int64_t num_columns = transposed ? tile.count() : operand_.columns;
  bool finite = true;
  for (int64_t i = 0; i < num_rows; ++i) finite = finite && all_finite(loaded.row(i), num_columns);
  finite_[slot] = finite;
}

template <class Real>
Block<const Real> PackedOperand<Real>::load_rows_of(const Positions& positions, Real* target) const {
  if (form_ == Form::kRows) return load_positions<Real>(p_, operand_, positions, target);
  const int64_t width = num_tiles(positions.count(), kClipRows) * kClipRows;
  for_each_run(p_, positions, [&](const RowRange& rows, int64_t first) {
    const bool last = first + rows.count == positions.count();
    load_transposed<Real>(operand_, rows, last ? width - first : rows.count, {target + first, tile_rows_});
  });
  return {target, tile_rows_};
}

template <class Real>
Block<const Real> PackedOperand<Real>::tile(int64_t batch, int64_t head, int64_t tile) const {
  if (in_place_) return load_rows_of(positions(batch, head, tile), nullptr);
  const int64_t stride = form_ == Form::kTransposed ? tile_rows_ : operand_.columns;
  return {storage_.data() + slot(batch, head, tile) * tile_elements(), stride};
}

std::vector<HeadRange> head_groups(const attention::AttentionParams& params, int64_t bytes_per_key_head) {
  const int64_t num_heads = params.batch * params.num_heads_k;
  const int64_t group = bytes_per_key_head == 0 ? num_heads : std::max<int64_t>(1, kPackedBytes / bytes_per_key_head);
  std::vector<HeadRange> groups;
  for (int64_t begin = 0; begin < num_heads; begin += group) {
    groups.push_back({begin, std::min(begin + group, num_heads)});
  }
  return groups;
}

template class PackedOperand<float>;
template class PackedOperand<double>;

}  // namespace flash_attn_ext::cpu
