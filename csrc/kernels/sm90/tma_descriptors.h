// The TMA descriptors of a call's matrices.
#pragma once

#include "kernels/sm90/tensor_map.h"

namespace flash_attn_ext::sm90 {

// Makes the descriptors of Q, K and V, and of dO in a backward pass. Arguments has `params` and a descriptor for each.
template <class Arguments>
cudaError_t make_tma_descriptors(Arguments& args, int query_rows, int key_rows) {
  const auto& p = args.params;
  const bool packed = p.sequences.cu_seqlens_q != nullptr;
  const int64_t batch = packed ? 1 : p.batch;
  const int64_t queries = packed ? p.sequences.total_q : p.sequences.max_seqlen_q;
  const int64_t keys = packed ? p.sequences.total_k : p.sequences.max_seqlen_k;
  const auto make = [&](TmaDescriptor& operand, const attention::MatrixView& view, const OperandShape& shape) {
    return make_tma_descriptor(operand, view, shape, p.element);
  };
  cudaError_t error = make(args.q, p.q, {batch, p.num_heads_q, queries, p.head_dim_qk, query_rows});
  if (error == cudaSuccess) error = make(args.k, p.k, {batch, p.num_heads_k, keys, p.head_dim_qk, key_rows});
  if (error == cudaSuccess) error = make(args.v, p.v, {batch, p.num_heads_k, keys, p.head_dim_v, key_rows});
  if constexpr (requires { args.dout; }) {
    const OperandShape shape = {batch, p.num_heads_q, queries, p.head_dim_v, query_rows};
    if (error == cudaSuccess) error = make(args.dout, p.dout, shape);
  }
  return error;
}

// Makes the descriptor of O. Where the TMA cannot write O, warps do.
inline OutputMap make_output_map(const attention::ForwardParams& p) {
  const bool packed = p.sequences.cu_seqlens_q != nullptr;
  const int64_t queries = packed ? p.sequences.total_q : p.sequences.max_seqlen_q;
  const OperandShape shape = {packed ? 1 : p.batch, p.num_heads_q, queries, p.head_dim_v, OutputMap::kRows};
  OutputMap map;
  map.rows = static_cast<int>(queries);
  map.exists = p.out.column_stride == 1 && make_tma_descriptor(map.boxes, p.out, shape, p.element) == cudaSuccess;
  return map;
}

}  // namespace flash_attn_ext::sm90
