#include <cudaTypedefs.h>

#include "kernels/schedule/relative_bias_boxes.h"
#include "kernels/sm90/tensor_map.h"
#include "tile/sm90/smem_tile.h"

namespace flash_attn_ext::sm90 {
namespace {

// The driver's function, found at run time, because the build links no libcuda.
PFN_cuTensorMapEncodeTiled_v12000 find_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
  return error == cudaSuccess && found == cudaDriverEntryPointSuccess
             ? reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function)
             : nullptr;
}

}  // namespace

cudaError_t make_tma_descriptor(TmaDescriptor& operand, const attention::MatrixView& view, const OperandShape& shape,
                                attention::ElementType element) {
  static const PFN_cuTensorMapEncodeTiled_v12000 encode = find_encoder();
  if (encode == nullptr) return cudaErrorNotSupported;
  constexpr int64_t kBytes = 2;
  operand.head_step = shape.heads_are_packed_queries || (shape.heads > 1 && view.head_stride != 0);
  operand.batch_step = shape.batch > 1 && view.batch_stride != 0;
  // The stride of a dimension of size 1 is never used, but must be one that the TMA could use.
  const auto bytes_between = [](int64_t places, int64_t stride) {
    return static_cast<cuuint64_t>(places > 1 ? stride * kBytes : 16);
  };
  const int64_t heads = operand.head_step ? shape.heads : 1;
  const int64_t batch = operand.batch_step ? shape.batch : 1;
  const cuuint64_t extents[] = {static_cast<cuuint64_t>(shape.columns), static_cast<cuuint64_t>(shape.rows),
                                static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(batch)};
  const cuuint64_t strides[] = {bytes_between(shape.rows, view.row_stride), bytes_between(heads, view.head_stride),
                                bytes_between(batch, view.batch_stride)};
  const cuuint32_t box[] = {tile::kSmemChunkColumns, static_cast<cuuint32_t>(shape.box_rows),
                            static_cast<cuuint32_t>(shape.box_heads), 1};
  const cuuint32_t element_strides[] = {1, 1, 1, 1};
  const CUtensorMapDataType type =
      element == attention::ElementType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const auto encode_it = [&] {
    return encode(&operand.map, type, 4, view.data, extents, strides, box, element_strides,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult result = encode_it();
  if (result == CUDA_ERROR_INVALID_CONTEXT) {  // the thread has called no CUDA function yet, as autograd's threads
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaSetDevice(device);
    if (error != cudaSuccess) return error;
    result = encode_it();
  }
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t make_bias_map(BiasDescriptor& bias, const attention::AttentionParams& params, void* boxes) {
  const attention::BroadcastView& view = params.score_mod.bias;
  const attention::SequenceTable& lengths = params.sequences;
  const bool is_relative = view.is_relative();
  attention::MatrixView rows = {.data = const_cast<void*>(view.data),
                                .batch_stride = view.batch_stride,
                                .head_stride = view.head_stride,
                                .row_stride = view.query_stride,
                                .column_stride = 1};
  OperandShape shape = {params.batch, params.num_heads_q, lengths.max_seqlen_q, lengths.max_seqlen_k,
                        RelativeBiasBoxes::kRows};
  int first_column = 0;
  if (is_relative) {
    if (boxes == nullptr) return cudaErrorInvalidValue;
    const RelativeBiasBoxes written = relative_bias_boxes(params);
    first_column = written.first_column;
    rows = {.data = boxes,
            .head_stride = written.heads > 1 ? written.head_stride() : 0,
            .row_stride = written.columns,
            .column_stride = 1};
    shape = {1, written.heads, RelativeBiasBoxes::kRows, written.columns, RelativeBiasBoxes::kRows};
  }
  TmaDescriptor operand;
  const cudaError_t error = make_tma_descriptor(operand, rows, shape, params.element);
  bias = {.map = operand.map,
          .head_step = operand.head_step,
          .batch_step = operand.batch_step,
          .first_column = first_column,
          .column_step = is_relative ? -1 : 0,
          .row_step = is_relative ? 0 : 1};
  return error;
}

}  // namespace flash_attn_ext::sm90
