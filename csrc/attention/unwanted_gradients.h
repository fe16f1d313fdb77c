// Memory for a gradient that a call does not ask for, but which its kernels compute together with those that it does.
#pragma once

#include "attention/params.h"

namespace flash_attn_ext::attention {

// dQ where the call does not ask for it, or dV where it asks for neither dK nor dV: contiguous rows of 16-bit elements.
struct UnwantedGradient {
  bool is_dq;
  int64_t batch;  // 1 for a packed batch, whose rows are those of all sequences
  int64_t heads;
  int64_t rows;
  int64_t columns;

  static UnwantedGradient of(const BackwardParams& p) {
    const bool packed = p.sequences.cu_seqlens_q != nullptr;
    const SequenceTable& lengths = p.sequences;
    const bool is_dq = p.dq.data == nullptr;
    const int64_t queries = packed ? lengths.total_q : lengths.max_seqlen_q;
    const int64_t keys = packed ? lengths.total_k : lengths.max_seqlen_k;
    return {.is_dq = is_dq,
            .batch = packed ? 1 : p.batch,
            .heads = is_dq ? p.num_heads_q : p.num_heads_k,
            .rows = is_dq ? queries : keys,
            .columns = is_dq ? p.head_dim_qk : p.head_dim_v};
  }

  int64_t bytes() const { return batch * heads * rows * columns * 2; }
  MatrixView at(void* data) const {
    return {.data = data,
            .batch_stride = batch > 1 ? heads * rows * columns : 0,
            .head_stride = rows * columns,
            .row_stride = columns,
            .column_stride = 1};
  }
};

// The call with the gradient that it does not ask for, at `data`.
inline BackwardParams with_unwanted_gradient(BackwardParams p, void* data) {
  const UnwantedGradient unwanted = UnwantedGradient::of(p);
  (unwanted.is_dq ? p.dq : p.dv) = unwanted.at(data);
  return p;
}

}  // namespace flash_attn_ext::attention
