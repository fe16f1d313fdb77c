// TMA descriptors of matrix operands.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "attention/params.h"

namespace flash_attn_ext::sm90 {

// A matrix operand as the TMA reads it. A dimension that is broadcast has one place for all coordinates.
struct TmaDescriptor {
  CUtensorMap map;
  int head_step;   // 0 where all heads are the same
  int batch_step;  // 0 where all batch entries are the same, and in a packed batch
};

// A result as the TMA writes it, a warp's rows at a time.
struct OutputMap {
  static constexpr int kRows = 16;

  TmaDescriptor boxes;
  int rows;     // of the tensor; nothing is written behind them
  bool exists;  // the TMA can write the tensor
};

// The matrix that is read in TMA boxes. It has the rows that exist, in all sequences of a packed batch.
struct OperandShape {
  int64_t batch;
  int64_t heads;
  int64_t rows;
  int64_t columns;
  int box_rows;
};

cudaError_t make_tma_descriptor(TmaDescriptor& operand, const attention::MatrixView& view, const OperandShape& shape,
                                attention::ElementType element);

// The descriptor of a bias that has a value for each query and key, in boxes of `box_rows` queries.
cudaError_t make_bias_map(TmaDescriptor& operand, const attention::AttentionParams& params, int box_rows);

}  // namespace flash_attn_ext::sm90
