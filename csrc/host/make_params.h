// Converts tensors and options into the parameters that kernels read, every field by name.
#pragma once

#include "attention/params.h"
#include "host/call/inputs.h"

namespace flash_attn_ext::host {

attention::ElementType element_type(at::ScalarType dtype);
attention::Visibility make_visibility(const std::optional<std::string>& causal,
                                      const std::optional<int64_t>& window_left,
                                      const std::optional<int64_t>& window_right);
attention::Dropout make_dropout(double dropout_p, const std::optional<at::Tensor>& rng_seed);

// The views of (B, H, S, D) or packed (T, H, D), and of (B, H, S) or packed (H, T), for memory that kernels only read.
// An undefined tensor gives an absent view.
attention::MatrixView matrix_view(const at::Tensor& tensor);
attention::StatisticView statistic_view(const at::Tensor& tensor);

// The same for memory that kernels write.
attention::MatrixView written_matrix_view(const at::Tensor& tensor);
attention::StatisticView written_statistic_view(const at::Tensor& tensor);

// Describes the gradient of a bias for a plan: which dimensions the bias has in full. Its memory is allocated after the
// plan is made.
attention::BiasGradient describe_dbias(const AttentionInputs& in);

// The view of (B|1, H|1, S, 2 n) or packed (H|1, T, 2 n) intervals, whose last dimension is contiguous.
attention::RowIntervals row_intervals(const at::Tensor& intervals);

// The view of (B|1, H|1, query blocks, key blocks), whose last dimension is contiguous.
attention::BlockMask block_mask(const at::Tensor& blocks, int64_t num_queries, int64_t num_keys);

// The parameters that forward and backward share. The views are those of the inputs as given.
attention::AttentionParams make_attention_params(const AttentionInputs& inputs);

}  // namespace flash_attn_ext::host
