#include "kernels/cpu/gemm/packed_operand.h"

#include <algorithm>

#include "attention/division.h"
#include "kernels/cpu/rows/row_ops.h"
#include "kernels/cpu/schedule/tiles.h"
#include "kernels/cpu/services.h"

namespace flash_attn_ext::cpu {

template <class Real>
PackedOperand<Real>::PackedOperand(const attention::AttentionParams& params, const Operand& operand, Form form)
    : p_(params),
      operand_(operand),
      form_(form),
      in_place_(form == Form::kRows && !scattered(params) && operand.readable_in_place<Real>()) {
  const int64_t longest = params.sequences.max_seqlen_k;
  num_tiles_ = attention::ceil_div(longest, kStreamedRows);
  tile_rows_ = std::min(kStreamedRows, attention::ceil_div(longest, kClipRows) * kClipRows);
}

template <class Real>
int64_t PackedOperand<Real>::bytes_per_key_head() const {
  if (in_place_) return 0;
  return num_tiles_ * tile_elements() * static_cast<int64_t>(sizeof(Real));
}

template <class Real>
void PackedOperand<Real>::load(const HeadRange& key_heads) {
  first_head_ = key_heads.begin;
  const int64_t num_slots = (key_heads.end - key_heads.begin) * num_tiles_;
  if (!in_place_) storage_.reserve(num_slots * tile_elements());
  finite_.resize(num_slots);
  parallel_for(num_slots, 1, [&](int64_t begin, int64_t end) {
    for (int64_t slot = begin; slot < end; ++slot) load_tile(slot);
  });
}

template <class Real>
Positions PackedOperand<Real>::positions(int64_t batch, int64_t head, int64_t tile) const {
  const attention::Sequence sequence = p_.sequence_of(batch);
  const int64_t begin = tile * kStreamedRows;
  return {sequence, head, {begin, std::min(begin + kStreamedRows, sequence.num_keys)}};
}

template <class Real>
void PackedOperand<Real>::load_tile(int64_t slot) {
  const int64_t head_index = first_head_ + slot / num_tiles_;
  const Positions tile = positions(head_index / p_.num_heads_k, head_index % p_.num_heads_k, slot % num_tiles_);
  if (tile.range.empty()) return;
  const Block<const Real> loaded = load_rows_of(tile, in_place_ ? nullptr : storage_.data() + slot * tile_elements());
  if (form_ == Form::kRows) finite_[slot] = all_finite<Real>(loaded, tile.count(), operand_.columns);
}

template <class Real>
Block<const Real> PackedOperand<Real>::load_rows_of(const Positions& positions, Real* target) const {
  if (form_ == Form::kRows) return load_positions<Real>(p_, operand_, positions, target);
  const int64_t width = attention::ceil_div(positions.count(), kClipRows) * kClipRows;
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

bool one_tile_of_keys(const attention::AttentionParams& params) {
  return params.sequences.max_seqlen_k <= kStreamedRows;
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
