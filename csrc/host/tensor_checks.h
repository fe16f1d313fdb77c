// What is required of one tensor, or of two together; the building blocks of all other checks.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

namespace flash_attn_ext::host {

// As Python spells it: "float16".
std::string dtype_name(at::ScalarType dtype);

// One of those that there are kernels for. `to_cast`: the tensors that have this dtype, in words.
void check_element_type(const char* name, const at::Tensor& tensor, const char* to_cast);

void check_dtype_and_device(const char* name, const at::Tensor& tensor, const at::Tensor& q);
void check_device(const char* name, const at::Tensor& tensor, const at::Tensor& q);

// Whether memory does not have the values: PyTorch negates lazily, and knows zeros without memory.
bool is_lazy(const at::Tensor& tensor);

// Whether there is memory behind a tensor, and its values are there. Other checks are for meta and sparse tensors.
bool holds_memory(const at::Tensor& tensor);
void check_holds_memory(const char* name, const at::Tensor& tensor);
inline void check_holds_memory(const char* name, const std::optional<at::Tensor>& tensor) {
  if (tensor) check_holds_memory(name, *tensor);
}

// Kernels address memory by strides.
void check_dense(const char* name, const at::Tensor& tensor);

void check_rank(const char* name, const at::Tensor& tensor, int64_t rank, const char* layout);

// `of`: whose size is expected.
void check_size(const char* name, const char* what, int64_t got, int64_t expected, const char* of);

}  // namespace flash_attn_ext::host
