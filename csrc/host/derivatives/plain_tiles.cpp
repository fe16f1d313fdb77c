#include "host/derivatives/plain_tiles.h"

#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "host/checks/tensor_checks.h"
#include "host/library/library.h"
#include "host/make_params.h"
#include "host/memory/allocate.h"

namespace flash_attn_ext::host {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

void check_tensor(const char* name, const at::Tensor& tensor, at::IntArrayRef sizes, const at::Tensor& products) {
  check_holds_memory(name, tensor);
  TORCH_CHECK(tensor.device() == products.device(), name, " is on ", tensor.device(), ", but products is on ",
              products.device());
  TORCH_CHECK(tensor.scalar_type() == at::kFloat, name, " has dtype ", dtype_name(tensor.scalar_type()),
              ", expected float32");
  TORCH_CHECK(tensor.sizes() == sizes, name, " has shape ", tensor.sizes(), ", expected ", sizes);
  TORCH_CHECK(tensor.is_contiguous(), name, " has strides ", tensor.strides(), ", expected a contiguous tensor; pass ",
              name, ".contiguous()");
}

const float* elements(const char* name, const at::Tensor& tensor, const at::Tensor& products) {
  check_tensor(name, tensor, products.sizes(), products);
  const auto* data = tensor.const_data_ptr<float>();
  constexpr uintptr_t kLoadBytes = 16;
  TORCH_CHECK(reinterpret_cast<uintptr_t>(data) % kLoadBytes == 0, name, " begins at ", static_cast<const void*>(data),
              ", expected a multiple of ", kLoadBytes, " bytes; pass ", name, ".clone()");
  return data;
}

const float* elements(const char* name, const OptionalTensor& tensor, const at::Tensor& products) {
  return tensor ? elements(name, *tensor, products) : nullptr;
}

const float* of_rows(const char* name, const at::Tensor& tensor, const at::Tensor& products) {
  check_tensor(name, tensor, {products.size(0), products.size(1), 1}, products);
  return tensor.const_data_ptr<float>();
}

// Saturates a column far beyond any that exists, with room to add the index of a query.
int small(int64_t column) {
  constexpr int64_t kLimit = int64_t{1} << 30;
  return static_cast<int>(std::clamp(column, -kLimit, kLimit));
}

derivatives::PlainTile plain_tile(const PlainTileInputs& in) {
  const at::Tensor& products = in.products;
  TORCH_CHECK(products.is_cuda(), "products is on ", products.device(), ", expected a GPU");
  check_rank("products", products, 3, "(pairs, rows, keys)");
  TORCH_CHECK(in.dtype == at::kFloat || in.dtype == at::kBFloat16, "dtype is ", dtype_name(in.dtype),
              ", expected float32 or bfloat16");
  TORCH_CHECK(in.num_queries > 0 && products.size(1) % in.num_queries == 0, "num_queries is ", in.num_queries,
              ", expected a divisor of the number of rows, ", products.size(1));
  constexpr int64_t kMost = int64_t{1} << 29;
  TORCH_CHECK(products.size(0) * products.size(1) <= kMost && products.size(2) <= kMost, "products has shape ",
              products.sizes(), ", expected at most ", kMost, " rows and columns; take a smaller tile");
  const int num_columns = static_cast<int>(products.size(2));
  return {.element = element_type(in.dtype),
          .num_rows = products.size(0) * products.size(1),
          .num_columns = num_columns,
          .num_queries = static_cast<int>(in.num_queries),
          .band = {small(in.visible.first), small(in.visible.second), num_columns},
          .scale = static_cast<float>(in.scale),
          .products = elements("products", products, products),
          .product_tangents = elements("product_tangents", in.product_tangents, products),
          .lse = of_rows("lse", in.lse, products)};
}

// Memory for a result, if it is wanted.
OptionalTensor result(const PlainTileInputs& tile, bool wanted) {
  if (!wanted) return std::nullopt;
  return empty(tile.products.sizes(), tile.dtype, tile.products.device());
}

void* memory_of(const OptionalTensor& tensor) { return tensor ? tensor->mutable_data_ptr() : nullptr; }

}  // namespace

std::array<std::optional<at::Tensor>, 2> plain_weights(const PlainTileInputs& tile, const at::Tensor& lse_tangent,
                                                       bool wants_weights) {
  const derivatives::PlainTile params = plain_tile(tile);
  check_tensor("lse_tangent", lse_tangent, tile.lse.sizes(), tile.products);
  const c10::DeviceGuard guard(tile.products.device());
  const std::array results = {result(tile, wants_weights), result(tile, tile.product_tangents.has_value())};
  const derivatives::PlainWeights wanted = {.weights = memory_of(results[0]),
                                            .weighted = memory_of(results[1]),
                                            .lse_tangent = lse_tangent.mutable_data_ptr<float>()};
  launch(tile.products.device(), [&](void* stream) { return kernels().gpu.plain_weights(params, wanted, stream); });
  return results;
}

std::array<std::optional<at::Tensor>, 3> plain_gradients(const PlainTileInputs& tile,
                                                         const PlainGradientInputs& gradients,
                                                         bool wants_weight_tangents) {
  const at::Tensor& products = tile.products;
  const derivatives::PlainTile params = plain_tile(tile);
  derivatives::PlainGradients given = {
      .lse_tangent = of_rows("lse_tangent", gradients.lse_tangent, products),
      .weight_gradients = elements("weight_gradients", gradients.weight_gradients, products),
      .weight_gradient_tangents = elements("weight_gradient_tangents", gradients.weight_gradient_tangents, products),
      .delta = of_rows("delta", gradients.delta, products),
      .delta_tangent = of_rows("delta_tangent", gradients.delta_tangent, products)};
  const c10::DeviceGuard guard(products.device());
  const std::array results = {result(tile, wants_weight_tangents), result(tile, tile.product_tangents.has_value()),
                              result(tile, true)};
  given.weight_tangents = memory_of(results[0]);
  given.score_gradients = memory_of(results[1]);
  given.score_gradient_tangents = memory_of(results[2]);
  launch(products.device(), [&](void* stream) { return kernels().gpu.plain_gradients(params, given, stream); });
  return results;
}

}  // namespace flash_attn_ext::host
