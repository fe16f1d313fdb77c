// Tensors and options -> what the kernels read, every field by name.
#pragma once

#include "attention/params.h"
#include "host/call/inputs.h"

namespace flash_attn_ext::host {

attention::ElementType element_type(at::ScalarType dtype);
attention::Visibility make_visibility(const std::optional<std::string>& causal,
                                      const std::optional<int64_t>& window_left,
                                      const std::optional<int64_t>& window_right);
attention::Dropout make_dropout(double dropout_p, const std::optional<at::Tensor>& rng_seed);

// Of what kernels only read: (B, H, S, D) or packed (T, H, D); (B, H, S) or packed (H, T). An undefined tensor gives an
// absent view.
attention::MatrixView matrix_view(const at::Tensor& tensor);
attention::StatisticView statistic_view(const at::Tensor& tensor);

// The same of what kernels write.
attention::MatrixView written_matrix_view(const at::Tensor& tensor);
attention::StatisticView written_statistic_view(const at::Tensor& tensor);

// The gradient of a bias as plans see it: which dimensions the bias has of its own. Its memory comes after the plan.
attention::BiasGradient describe_dbias(const at::Tensor& bias);

// The part that forward and backward share; the views are of the inputs as given.
attention::AttentionParams make_attention_params(const AttentionInputs& inputs);

}  // namespace flash_attn_ext::host
