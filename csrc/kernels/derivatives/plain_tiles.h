// Forward mode and double backward of plain tiles of scores, which only a scale changes and only causality and windows
// hide, on a GPU: what flash_attn_ext/derivatives/ does to the elements of every tile, between products of matrices.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "attention/params.h"

namespace flash_attn_ext::derivatives {

// Everything of a tile is (rows, columns) without gaps, everything of rows is float32. A row is a query of one head, a
// column a key; rows of the same head are neighbours.
struct PlainTile {
  attention::ElementType element;  // of what is written: float32 or bfloat16
  int64_t num_rows;
  int num_columns;
  int num_queries;       // of each head
  attention::Band band;  // what query 0 to num_queries - 1 of a head see; its length is num_columns
  float scale;
  const float* products;          // q k^T
  const float* product_tangents;  // q' k^T + q k'^T; nullptr where neither q nor k has a tangent
  const float* lse;               // of rows; 0 for a row that sees nothing
};

// P = exp(scale * products - lse), dS = scale * product_tangents.
struct PlainWeights {
  void* weights;       // P; nullptr where nobody asks for it
  void* weighted;      // P dS; nullptr as product_tangents
  float* lse_tangent;  // of rows: the sum of P dS is added to it
};

// With D for delta, and primes for tangents:
// P' = P (dS - lse'), score gradients = P (G - D), their tangents = P' (G - D) + P (G' - D').
struct PlainGradients {
  const float* lse_tangent;               // of rows, as delta and its tangent
  const float* weight_gradients;          // G = dO V^T
  const float* weight_gradient_tangents;  // G' = dO V'^T; nullptr where v has no tangent
  const float* delta;
  const float* delta_tangent;
  void* weight_tangents = nullptr;          // P'; nullptr where nobody asks for it
  void* score_gradients = nullptr;          // nullptr where nobody asks for it
  void* score_gradient_tangents = nullptr;  // always written
};

// Each queues one kernel. What is hidden is written as 0, whatever is read there.
cudaError_t plain_weights(const PlainTile& tile, const PlainWeights& results, cudaStream_t stream);
cudaError_t plain_gradients(const PlainTile& tile, const PlainGradients& gradients, cudaStream_t stream);

}  // namespace flash_attn_ext::derivatives
