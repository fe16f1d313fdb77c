// Forward mode and double backward of plain tiles, on tensors; kernels/derivatives/plain_tiles.h says what they
// compute.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <utility>

namespace flash_attn_ext::host {

// Scores are (pairs, rows, keys), and values of rows are (pairs, rows, 1). All are float32, contiguous and on a GPU.
// The rows of a pair are the queries of its query heads, head after head.
struct PlainTileInputs {
  const at::Tensor& products;
  const std::optional<at::Tensor>& product_tangents;
  const at::Tensor& lse;
  double scale;
  std::pair<int64_t, int64_t> visible;  // columns [begin, end) that a head's query 0 sees; query i sees those i further
  int64_t num_queries;                  // of a head
  at::ScalarType dtype;                 // of the results: float32 or bfloat16
};

struct PlainGradientInputs {
  const at::Tensor& lse_tangent;
  const at::Tensor& weight_gradients;
  const std::optional<at::Tensor>& weight_gradient_tangents;
  const at::Tensor& delta;
  const at::Tensor& delta_tangent;
};

// Returns weights (if wanted), and weights times score tangents (if there are product_tangents). The row sums of the
// latter are added to lse_tangent.
std::array<std::optional<at::Tensor>, 2> plain_weights(const PlainTileInputs& tile, const at::Tensor& lse_tangent,
                                                       bool wants_weights);

// Returns the tangents of weights (if wanted), score gradients (if there are product_tangents, because nothing else is
// multiplied by them), and the tangents of score gradients.
std::array<std::optional<at::Tensor>, 3> plain_gradients(const PlainTileInputs& tile,
                                                         const PlainGradientInputs& gradients,
                                                         bool wants_weight_tangents);

}  // namespace flash_attn_ext::host
