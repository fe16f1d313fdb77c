#include "host/memory/readable.h"

#include <ATen/ops/empty.h>

#include "host/make_params.h"
#include "host/report/log.h"

namespace flash_attn_ext::host {
namespace {

constexpr int64_t kRowAlignmentBytes = 16;

at::Tensor copy_with_aligned_rows(const at::Tensor& tensor) {
  return empty_with_aligned_rows(tensor).narrow(-1, 0, tensor.size(-1)).copy_(tensor);
}

// Returns a copy, or an undefined tensor where kernels can read the operand in place.
at::Tensor copy_unless_readable(const Backend& backend, const char* name, const at::Tensor& operand) {
  if (backend.readable(operand)) return {};
  log_copy(name, operand, "contiguous rows (the last dimension) that begin at multiples of 16 bytes");
  return copy_with_aligned_rows(operand);
}

at::Tensor copy_unless_contiguous(const char* name, const at::Tensor& array) {
  if (array.is_contiguous()) return {};
  log_copy(name, array, "a contiguous array");
  return array.contiguous();
}

}  // namespace

at::Tensor empty_with_aligned_rows(const at::Tensor& like) {
  const int64_t alignment = kRowAlignmentBytes / like.element_size();
  at::DimVector sizes(like.sizes());
  sizes.back() = (sizes.back() + alignment - 1) / alignment * alignment;
  return at::empty(sizes, like.options());
}

at::Tensor readable_matrix(const Backend& backend, const char* name, const at::Tensor& operand) {
  at::Tensor copy = copy_unless_readable(backend, name, operand);
  return copy.defined() ? copy : operand;
}

at::Tensor readable_array(const char* name, const at::Tensor& array) {
  at::Tensor copy = copy_unless_contiguous(name, array);
  return copy.defined() ? copy : array;
}

at::Tensor readable_table(const char* name, const at::Tensor& table) {
  if (table.stride(-1) == 1 || table.size(-1) == 1) return table;
  log_copy(name, table, "contiguous rows (the last dimension)");
  return table.contiguous();
}

InputCopies make_readable(const Backend& backend, const AttentionInputs& in, attention::AttentionParams& params) {
  InputCopies copies = make_readable_except_keys(backend, in, params);
  copies.k = copy_unless_readable(backend, "k", in.k);
  copies.v = copy_unless_readable(backend, "v", in.v);
  if (copies.k.defined()) params.k = matrix_view(copies.k);
  if (copies.v.defined()) params.v = matrix_view(copies.v);
  return copies;
}

InputCopies make_readable_except_keys(const Backend& backend, const AttentionInputs& in,
                                      attention::AttentionParams& params) {
  InputCopies copies;
  copies.q = copy_unless_readable(backend, "q", in.q);
  if (copies.q.defined()) params.q = matrix_view(copies.q);
  // Every kernel reads these few numbers per head or sequence as a contiguous array.
  if (in.sink) copies.sink = copy_unless_contiguous("sink", *in.sink);
  if (in.cu_seqlens_q) copies.cu_seqlens_q = copy_unless_contiguous("cu_seqlens_q", *in.cu_seqlens_q);
  if (in.cu_seqlens_k) copies.cu_seqlens_k = copy_unless_contiguous("cu_seqlens_k", *in.cu_seqlens_k);
  if (in.intervals && in.intervals->stride(-1) != 1) {
    copies.intervals = copy_unless_contiguous("intervals", *in.intervals);
    params.score_mod.intervals = row_intervals(copies.intervals);
  }
  if (in.blocks && in.blocks->size(-1) > 1 && in.blocks->stride(-1) != 1) {
    copies.blocks = copy_unless_contiguous("blocks", *in.blocks);
    const attention::SequenceTable& lengths = params.sequences;
    params.score_mod.blocks = block_mask(copies.blocks, lengths.max_seqlen_q, lengths.max_seqlen_k);
  }
  if (copies.sink.defined()) params.sink = copies.sink.const_data_ptr();
  if (copies.cu_seqlens_q.defined()) params.sequences.cu_seqlens_q = copies.cu_seqlens_q.const_data_ptr<int32_t>();
  if (copies.cu_seqlens_k.defined()) params.sequences.cu_seqlens_k = copies.cu_seqlens_k.const_data_ptr<int32_t>();
  return copies;
}

}  // namespace flash_attn_ext::host
