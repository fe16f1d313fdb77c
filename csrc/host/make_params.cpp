#include "host/make_params.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>

#include "attention/division.h"
#include "host/checks/sequence_lengths.h"

namespace flash_attn_ext::host {
namespace {

using attention::BroadcastView;

BroadcastView broadcast_view(const std::optional<at::Tensor>& tensor) {
  if (!tensor) return {};
  const auto stride = [&](int64_t d) { return tensor->size(d) == 1 ? int64_t{0} : tensor->stride(d); };
  return {.data = tensor->const_data_ptr(),
          .element = element_type(tensor->scalar_type()),
          .batch_stride = stride(0),
          .head_stride = stride(1),
          .query_stride = stride(2),
          .key_stride = stride(3)};
}

BroadcastView relative_bias_view(const at::Tensor& bias, int64_t queries) {
  const auto* first = static_cast<const char*>(bias.const_data_ptr());
  return {.data = first + std::max<int64_t>(queries - 1, 0) * bias.element_size(),
          .element = element_type(bias.scalar_type()),
          .batch_stride = 0,
          .head_stride = bias.size(1) == 1 ? 0 : bias.stride(1),
          .query_stride = -1,
          .key_stride = 1};
}

attention::AlibiSlopes alibi_slopes(const std::optional<at::Tensor>& slopes) {
  if (!slopes) return {};
  return {.data = slopes->const_data_ptr(),
          .batch_stride = slopes->dim() == 2 ? slopes->stride(0) : 0,
          .head_stride = slopes->stride(-1)};
}

attention::SequenceTable sequence_table(const AttentionInputs& in) {
  const SequenceLengths longest = longest_sequences(in);
  return {.cu_seqlens_q = in.packed() ? in.cu_seqlens_q->const_data_ptr<int32_t>() : nullptr,
          .cu_seqlens_k = in.packed() ? in.cu_seqlens_k->const_data_ptr<int32_t>() : nullptr,
          .max_seqlen_q = longest.queries,
          .max_seqlen_k = longest.keys,
          .total_q = in.packed() ? in.q.size(0) : longest.queries,
          .total_k = in.packed() ? in.k.size(0) : longest.keys};
}

// Views have one type, whether kernels read or write them. mutable_data_ptr() would copy a lazily cloned tensor.
void* readable_memory(const at::Tensor& tensor) { return const_cast<void*>(tensor.const_data_ptr()); }

attention::MatrixView matrix_view_of(const at::Tensor& tensor, void* data) {
  const at::IntArrayRef strides = tensor.strides();
  const bool packed = strides.size() == 3;
  return {.data = data,
          .batch_stride = packed ? 0 : strides[0],
          .head_stride = strides[1],
          .row_stride = strides[packed ? 0 : 2],
          .column_stride = strides.back()};
}

attention::StatisticView statistic_view_of(const at::Tensor& tensor, void* data) {
  const bool packed = tensor.dim() == 2;
  return {.data = data, .batch_stride = packed ? 0 : tensor.stride(0), .head_stride = tensor.stride(packed ? 0 : 1)};
}

}  // namespace

attention::ElementType element_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return attention::ElementType::kFloat32;
    case at::kDouble:
      return attention::ElementType::kFloat64;
    case at::kBFloat16:
      return attention::ElementType::kBFloat16;
    case at::kHalf:
      return attention::ElementType::kFloat16;
    case at::kBool:
      return attention::ElementType::kBool;
    default:
      TORCH_INTERNAL_ASSERT(false, "unchecked dtype ", dtype);
  }
}

attention::Visibility make_visibility(const std::optional<std::string>& causal,
                                      const std::optional<int64_t>& window_left,
                                      const std::optional<int64_t>& window_right) {
  constexpr int64_t kUnbounded = attention::Visibility::kUnbounded;
  attention::Visibility visibility;
  visibility.left = std::min(window_left.value_or(kUnbounded), kUnbounded);
  visibility.right = causal ? 0 : std::min(window_right.value_or(kUnbounded), kUnbounded);
  visibility.top_left = causal == "top_left";
  return visibility;
}

attention::Dropout make_dropout(double dropout_p, const std::optional<at::Tensor>& rng_seed) {
  if (!rng_seed) return {};
  const double threshold = std::clamp(std::round(dropout_p * 65536.0), 1.0, 65535.0);
  return {.seed = rng_seed->const_data_ptr<int64_t>(),
          .threshold = static_cast<uint32_t>(threshold),
          .rescale = 1.0 / (1.0 - dropout_p)};
}

attention::MatrixView matrix_view(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return matrix_view_of(tensor, readable_memory(tensor));
}

attention::MatrixView written_matrix_view(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return matrix_view_of(tensor, tensor.mutable_data_ptr());
}

attention::StatisticView statistic_view(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.dim() < 2) return {};
  return statistic_view_of(tensor, readable_memory(tensor));
}

attention::StatisticView written_statistic_view(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.dim() < 2) return {};
  return statistic_view_of(tensor, tensor.mutable_data_ptr());
}

attention::BiasGradient describe_dbias(const AttentionInputs& in) {
  // A relative-position bias differs along queries and keys, whatever its shape.
  const auto split = [&](int64_t d) { return in.bias->size(d) != 1 || (d > 1 && in.bias_is_relative); };
  attention::BiasGradient dbias;
  dbias.wanted = true;
  dbias.per_batch = split(0);
  dbias.per_head = split(1);
  dbias.per_query = split(2);
  dbias.per_key = split(3);
  return dbias;
}

attention::RowIntervals row_intervals(const at::Tensor& intervals) {
  const bool packed = intervals.dim() == 3;
  const auto stride = [&](int64_t d) { return intervals.size(d) == 1 ? int64_t{0} : intervals.stride(d); };
  return {.data = intervals.const_data_ptr<int32_t>(),
          .batch_stride = packed ? 0 : stride(0),
          .head_stride = stride(packed ? 0 : 1),
          .query_stride = intervals.stride(-2),
          .count = static_cast<int>(intervals.size(-1) / 2)};
}

namespace {

// log2 of the size of blocks of which there are `count`.
int block_shift(int64_t count, int64_t length) {
  constexpr int kSmallest = 6;
  return count == attention::ceil_div(length, int64_t{1} << kSmallest) ? kSmallest : kSmallest + 1;
}

}  // namespace

attention::BlockMask block_mask(const at::Tensor& blocks, int64_t num_queries, int64_t num_keys) {
  const auto stride = [&](int64_t d) { return blocks.size(d) == 1 ? int64_t{0} : blocks.stride(d); };
  return {.data = static_cast<const uint8_t*>(blocks.const_data_ptr()),
          .batch_stride = stride(0),
          .head_stride = stride(1),
          .query_stride = stride(2),
          .query_shift = block_shift(blocks.size(2), num_queries),
          .key_shift = block_shift(blocks.size(3), num_keys),
          .last_query_block = static_cast<int>(blocks.size(2)) - 1,
          .last_key_block = static_cast<int>(blocks.size(3)) - 1};
}

attention::AttentionParams make_attention_params(const AttentionInputs& in) {
  attention::AttentionParams params;
  params.element = element_type(in.q.scalar_type());
  params.allow_tf32 = in.allow_tf32;
  params.batch = in.batch();
  params.num_heads_q = in.num_heads_q();
  params.num_heads_k = in.num_heads_k();
  params.head_dim_qk = in.head_dim_qk();
  params.head_dim_v = in.head_dim_v();
  params.sequences = sequence_table(in);
  params.visibility = make_visibility(in.causal, in.window_left, in.window_right);
  params.score_mod = {
      .scale = in.scale_factor(),
      .softcap = in.softcap.value_or(0.0),
      .alibi = alibi_slopes(in.alibi_slopes),
      .bias =
          in.bias_is_relative ? relative_bias_view(*in.bias, params.sequences.max_seqlen_q) : broadcast_view(in.bias),
      .mask = broadcast_view(in.mask),
      .mask_tiles = {},
      .mask_bits = {},
      .intervals = in.intervals ? row_intervals(*in.intervals) : attention::RowIntervals{},
      .blocks = in.blocks ? block_mask(*in.blocks, params.sequences.max_seqlen_q, params.sequences.max_seqlen_k)
                          : attention::BlockMask{}};
  params.dropout = make_dropout(in.dropout_p, in.rng_seed);
  params.sink = in.sink ? in.sink->const_data_ptr() : nullptr;
  params.q = matrix_view(in.q);
  params.k = matrix_view(in.k);
  params.v = matrix_view(in.v);
  return params;
}

}  // namespace flash_attn_ext::host
