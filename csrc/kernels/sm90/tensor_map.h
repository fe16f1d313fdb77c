// TMA descriptors of matrix operands, and those of all matrices of a call.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <utility>

#include "attention/params.h"

namespace flash_attn_ext::sm90 {

// A matrix operand as the TMA reads it. A dimension that is broadcast has one place for all coordinates.
struct TmaDescriptor {
  CUtensorMap map;
  int head_step;   // 0 where all heads are the same
  int batch_step;  // 0 where all batch entries are the same, and in a packed batch
};

// A bias as the TMA reads it, in boxes of 64 queries. Kernels without a bias have it among their arguments, too. It is
// as large as a TmaDescriptor, by which the bias was once described: with another size the arguments after it would
// move in all of them, and the machine code would change.
struct BiasDescriptor {
  CUtensorMap map;
  int head_step;
  int batch_step;
  int first_column;  // of key 0
  int column_step;   // from a query to the next one: -1 in RelativeBiasBoxes
  int row_step;      // 0 in RelativeBiasBoxes

  // The place of a box. first_query is a multiple of 64.
  __device__ __forceinline__ int column(int first_query, int first_key) const {
    return first_column + first_key + first_query * column_step;
  }
  __device__ __forceinline__ int row(int first_query) const { return first_query * row_step; }
};

static_assert(sizeof(BiasDescriptor) == sizeof(TmaDescriptor));

// A result as the TMA writes it, a warp's rows at a time.
struct OutputMap {
  static constexpr int kRows = 16;

  TmaDescriptor boxes;
  int rows;     // of the tensor; nothing is written after them
  bool exists;  // the TMA can write the tensor
};

// The matrix that is read in TMA boxes. It has the rows that exist, in all sequences of a packed batch.
struct OperandShape {
  int64_t batch;
  int64_t heads;
  int64_t rows;
  int64_t columns;
  int box_rows;
  int box_heads = 1;
  bool heads_are_packed_queries = false;  // a coordinate past a single one must not be moved to it
};

// Q or O with rows of packed heads (attention/packed_heads.h). Rows and heads change places, so that a box has the
// packed heads of box_rows / packed_heads queries. With 1 packed head nothing changes.
struct PackedOperand {
  attention::MatrixView view;
  OperandShape shape;

  static PackedOperand of(const attention::MatrixView& view, const OperandShape& shape, int packed_heads) {
    PackedOperand operand = {view, shape};
    if (packed_heads == 1) return operand;
    std::swap(operand.view.row_stride, operand.view.head_stride);
    std::swap(operand.shape.rows, operand.shape.heads);
    operand.shape.box_rows = packed_heads;
    operand.shape.box_heads = shape.box_rows / packed_heads;
    operand.shape.heads_are_packed_queries = true;
    return operand;
  }
};

cudaError_t make_tma_descriptor(TmaDescriptor& operand, const attention::MatrixView& view, const OperandShape& shape,
                                attention::ElementType element);

// The descriptor of a bias that has a value for each query and key, or of the boxes of a relative-position bias, which
// write_relative_bias_boxes() has written.
cudaError_t make_bias_map(BiasDescriptor& bias, const attention::AttentionParams& params, void* boxes);

// Makes the descriptors of Q, K and V, and of dO in a backward pass. Arguments has `params` and a descriptor for each.
// The batch coordinate of K and V is the entry or the page of a cache, if there is one.
template <class Arguments>
cudaError_t make_tma_descriptors(Arguments& args, int query_rows, int key_rows, int packed_heads = 1) {
  const auto& p = args.params;
  const bool packed = p.sequences.cu_seqlens_q != nullptr;
  const int64_t batch = packed ? 1 : p.batch;
  const int64_t queries = packed ? p.sequences.total_q : p.sequences.max_seqlen_q;
  const attention::KvCache& cache = p.cache;
  const int64_t key_entries = cache.present() ? cache.num_entries : batch;
  const int64_t capacity = packed ? p.sequences.total_k : p.sequences.max_seqlen_k;
  const int64_t keys = cache.paged() ? cache.page_size.divisor : capacity;
  const auto make = [&](TmaDescriptor& operand, const attention::MatrixView& view, const OperandShape& shape) {
    return make_tma_descriptor(operand, view, shape, p.element);
  };
  const OperandShape query_shape = {batch, p.num_heads_q, queries, p.head_dim_qk, query_rows};
  const PackedOperand q = PackedOperand::of(p.q, query_shape, packed_heads);
  cudaError_t error = make(args.q, q.view, q.shape);
  if (error == cudaSuccess) error = make(args.k, p.k, {key_entries, p.num_heads_k, keys, p.head_dim_qk, key_rows});
  if (error == cudaSuccess) error = make(args.v, p.v, {key_entries, p.num_heads_k, keys, p.head_dim_v, key_rows});
  if constexpr (requires { args.dout; }) {
    const OperandShape shape = {batch, p.num_heads_q, queries, p.head_dim_v, query_rows};
    if (error == cudaSuccess) error = make(args.dout, p.dout, shape);
  }
  return error;
}

// Makes the descriptor of O. Where the TMA cannot write O, warps do.
inline OutputMap make_output_map(const attention::BasicForwardParams& p, int packed_heads = 1) {
  const bool packed = p.sequences.cu_seqlens_q != nullptr;
  const int64_t queries = packed ? p.sequences.total_q : p.sequences.max_seqlen_q;
  const OperandShape shape = {packed ? 1 : p.batch, p.num_heads_q, queries, p.head_dim_v, OutputMap::kRows};
  const PackedOperand out = PackedOperand::of(p.out, shape, packed_heads);
  OutputMap map;
  map.rows = static_cast<int>(queries);
  map.exists =
      p.out.column_stride == 1 && make_tma_descriptor(map.boxes, out.view, out.shape, p.element) == cudaSuccess;
  return map;
}

}  // namespace flash_attn_ext::sm90
