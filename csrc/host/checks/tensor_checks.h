// Requirements on one tensor, or on two together. All other checks are built of these.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

namespace flash_attn_ext::host {

// The name as Python spells it, such as "float16".
std::string dtype_name(at::ScalarType dtype);

// Checks that there are kernels for the dtype. `to_cast`: the tensors that have this dtype, in words.
void check_element_type(const char* name, const at::Tensor& tensor, const char* to_cast);

void check_dtype_and_device(const char* name, const at::Tensor& tensor, const at::Tensor& q);
void check_device(const char* name, const at::Tensor& tensor, const at::Tensor& q);

// Whether memory does not hold the values, because PyTorch negates lazily, and has zero tensors without memory.
bool is_lazy(const at::Tensor& tensor);

// Whether a tensor has memory that holds its values. check_holds_memory lets meta and sparse tensors pass, for which
// there are other checks.
bool holds_memory(const at::Tensor& tensor);
void check_holds_memory(const char* name, const at::Tensor& tensor);
inline void check_holds_memory(const char* name, const std::optional<at::Tensor>& tensor) {
  if (tensor) check_holds_memory(name, *tensor);
}

// Checks that the tensor is strided, because kernels address memory by strides.
void check_dense(const char* name, const at::Tensor& tensor);

void check_rank(const char* name, const at::Tensor& tensor, int64_t rank, const char* layout);

// `of`: the tensor whose size is expected.
void check_size(const char* name, const char* what, int64_t got, int64_t expected, const char* of);

}  // namespace flash_attn_ext::host
