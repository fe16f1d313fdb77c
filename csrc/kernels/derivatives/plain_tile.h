// Tiles of scores that are only scaled, and masked only by causality and windows, in forward mode and double backward
// on a GPU: what the kernels of plain_tiles.h read and write.
#pragma once

#include <cstdint>

#include "attention/params.h"

namespace flash_attn_ext::derivatives {

// Matrices of a tile are contiguous (rows, columns); vectors over rows are float32. A row is a query of one head, and a
// column is a key. Rows of the same head are consecutive.
struct PlainTile {
  attention::ElementType element;  // of the results: float32 or bfloat16
  int64_t num_rows;
  int num_columns;
  int num_queries;       // of each head
  attention::Band band;  // what queries 0 to num_queries - 1 of a head see; its length is num_columns
  float scale;
  const float* products;          // q k^T
  const float* product_tangents;  // q' k^T + q k'^T; nullptr where neither q nor k has a tangent
  const float* lse;               // of each row; 0 for a row that sees nothing
};

// P = exp(scale * products - lse), dS = scale * product_tangents.
struct PlainWeights {
  void* weights;       // P; nullptr where it is not requested
  void* weighted;      // P dS; nullptr where product_tangents is
  float* lse_tangent;  // of each row; the sum of P dS is added to it
};

// D is delta, and primes are tangents: P' = P (dS - lse'), score gradients = P (G - D), and their tangents = P' (G - D)
// + P (G' - D').
struct PlainGradients {
  const float* lse_tangent;               // of each row, as delta and its tangent
  const float* weight_gradients;          // G = dO V^T
  const float* weight_gradient_tangents;  // G' = dO V'^T; nullptr where v has no tangent
  const float* delta;
  const float* delta_tangent;
  void* weight_tangents = nullptr;          // P'; nullptr where it is not requested
  void* score_gradients = nullptr;          // nullptr where they are not requested
  void* score_gradient_tangents = nullptr;  // always written
};

}  // namespace flash_attn_ext::derivatives
