// The two elementwise stages of a tile of scores that are only scaled: q.k -> P and P dS, then q.k and dP -> P', dS and
// dS'.
//
// Grid: one warp per row, 128 columns at a time. A lane has four columns: contiguous ones where rows begin at multiples
// of 16 bytes, and otherwise 32 apart. A row is summed in the order of the lanes' columns, then in a fixed butterfly
// order. The kernels are memory-bound: each element is written once, and read once where it is visible.
#include <type_traits>

#include "attention/division.h"
#include "kernels/derivatives/plain_tiles.h"
#include "kernels/score/score_tile.cuh"
#include "ptx/math.h"
#include "tile/accumulator.h"

namespace flash_attn_ext::derivatives {
namespace {

using attention::Divisor;
using attention::ElementType;

constexpr int kWarps = 4;
constexpr int kColumns = 4 * tile::kWarpSize;

// A lane's elements of a row.
struct alignas(16) Four {
  float at[4];
};

// The columns of the lane from `first` on. kQuads: they are contiguous.
template <bool kQuads>
__device__ __forceinline__ int column_of(int first, int e) {
  return first + (kQuads ? tile::lane() * 4 + e : tile::lane() + e * tile::kWarpSize);
}

// One warp's row.
struct Row {
  int64_t index;
  int64_t offset;    // of its first element
  int first_column;  // of those that it sees
  int end_column;

  __device__ __forceinline__ bool sees(int column) const { return first_column <= column && column < end_column; }
  __device__ __forceinline__ bool sees_any_of_four(int column) const {
    return first_column < column + 4 && column < end_column;
  }
};

__device__ __forceinline__ Row row_of(const PlainTile& tile, const Divisor& queries) {
  const uint32_t index = blockIdx.x * kWarps + tile::warp();
  const int query = static_cast<int>(index - queries.quotient(index) * queries.divisor);
  return {index, int64_t{index} * tile.num_columns, tile.band.first_column(query), tile.band.end_column(query)};
}

// Elements that the row does not see are arbitrary. They are 0 where there is no tensor.
template <bool kQuads>
__device__ __forceinline__ Four load(const float* tensor, const Row& row, int first) {
  Four values = {};
  if (tensor == nullptr) return values;
  const float* source = tensor + row.offset;
  if constexpr (kQuads) {
    const int column = column_of<kQuads>(first, 0);
    if (row.sees_any_of_four(column)) values = *reinterpret_cast<const Four*>(source + column);
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int column = column_of<kQuads>(first, e);
      if (row.sees(column)) values.at[e] = source[column];
    }
  }
  return values;
}

// Does nothing where there is no tensor.
template <class Element, bool kQuads>
__device__ __forceinline__ void store(void* tensor, const Row& row, int first, int num_columns, const Four& values) {
  if (tensor == nullptr) return;
  Element* target = static_cast<Element*>(tensor) + row.offset;
  if constexpr (kQuads) {
    const int column = column_of<kQuads>(first, 0);
    if (column >= num_columns) return;
    if constexpr (sizeof(Element) == sizeof(float)) {
      *reinterpret_cast<Four*>(target + column) = values;
    } else {
      *reinterpret_cast<uint2*>(target + column) = {ptx::pack(values.at[0], values.at[1], Element{}),
                                                    ptx::pack(values.at[2], values.at[3], Element{})};
    }
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int column = column_of<kQuads>(first, e);
      if (column < num_columns) target[column] = Element(values.at[e]);
    }
  }
}

// P and dS from q.k and its tangent. The LSE is subtracted first, since score and LSE may both be large.
struct Weight {
  float weight;
  float score_tangent;
};
__device__ __forceinline__ Weight weigh(const PlainTile& tile, float lse, float product, float product_tangent) {
  return {ptx::exp2(fmaf(product, tile.scale, -lse) * kLog2e), tile.scale * product_tangent};
}

template <class Element, bool kQuads>
__global__ void __launch_bounds__(kWarps* tile::kWarpSize)
    plain_weights_kernel(const __grid_constant__ PlainTile tile, const __grid_constant__ PlainWeights results,
                         const __grid_constant__ Divisor queries) {
  const Row row = row_of(tile, queries);
  if (row.index >= tile.num_rows) return;
  const float lse = tile.lse[row.index];
  float sum = 0.0f;
#pragma unroll 2
  for (int first = 0; first < tile.num_columns; first += kColumns) {
    const Four products = load<kQuads>(tile.products, row, first);
    const Four tangents = load<kQuads>(tile.product_tangents, row, first);
    Four weights;
    Four weighted;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const bool seen = row.sees(column_of<kQuads>(first, e));
      const Weight of = weigh(tile, lse, products.at[e], tangents.at[e]);
      // Selects 0 instead of multiplying by it: elements that are not seen may be NaN.
      weights.at[e] = seen ? of.weight : 0.0f;
      weighted.at[e] = seen ? of.weight * of.score_tangent : 0.0f;
      sum += weighted.at[e];
    }
    store<Element, kQuads>(results.weights, row, first, tile.num_columns, weights);
    store<Element, kQuads>(results.weighted, row, first, tile.num_columns, weighted);
  }
  sum = tile::sum_over_lanes<tile::kWarpSize>(sum);
  if (tile::lane() == 0) results.lse_tangent[row.index] += sum;
}

template <class Element, bool kQuads>
__global__ void __launch_bounds__(kWarps* tile::kWarpSize)
    plain_gradients_kernel(const __grid_constant__ PlainTile tile, const __grid_constant__ PlainGradients gradients,
                           const __grid_constant__ Divisor queries) {
  const Row row = row_of(tile, queries);
  if (row.index >= tile.num_rows) return;
  const float lse = tile.lse[row.index];
  const float lse_tangent = gradients.lse_tangent[row.index];
  const float delta = gradients.delta[row.index];
  const float delta_tangent = gradients.delta_tangent[row.index];
  for (int first = 0; first < tile.num_columns; first += kColumns) {
    const Four products = load<kQuads>(tile.products, row, first);
    const Four tangents = load<kQuads>(tile.product_tangents, row, first);
    const Four of_weights = load<kQuads>(gradients.weight_gradients, row, first);
    const Four of_weights_tangents = load<kQuads>(gradients.weight_gradient_tangents, row, first);
    Four weight_tangents;
    Four score_gradients;
    Four score_gradient_tangents;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const bool seen = row.sees(column_of<kQuads>(first, e));
      const Weight of = weigh(tile, lse, products.at[e], tangents.at[e]);
      const float weight_tangent = of.weight * (of.score_tangent - lse_tangent);
      const float above = of_weights.at[e] - delta;
      const float above_tangent = of_weights_tangents.at[e] - delta_tangent;
      // Selects 0 instead of multiplying by it: elements that are not seen may be NaN.
      weight_tangents.at[e] = seen ? weight_tangent : 0.0f;
      score_gradients.at[e] = seen ? of.weight * above : 0.0f;
      score_gradient_tangents.at[e] = seen ? fmaf(weight_tangent, above, of.weight * above_tangent) : 0.0f;
    }
    store<Element, kQuads>(gradients.weight_tangents, row, first, tile.num_columns, weight_tangents);
    store<Element, kQuads>(gradients.score_gradients, row, first, tile.num_columns, score_gradients);
    store<Element, kQuads>(gradients.score_gradient_tangents, row, first, tile.num_columns, score_gradient_tangents);
  }
}

// Calls launch(element, whether lanes have contiguous columns, CTAs) for the tile.
template <class Launch>
cudaError_t for_tile(const PlainTile& tile, const Launch& launch) {
  if (tile.num_rows == 0 || tile.num_columns == 0) return cudaSuccess;
  if (tile.num_rows > INT32_MAX - kWarps) return cudaErrorInvalidConfiguration;
  const auto blocks = static_cast<unsigned>(attention::ceil_div(tile.num_rows, kWarps));
  const auto for_columns = [&](auto element) {
    if (tile.num_columns % 4 == 0) {
      launch(element, std::true_type{}, blocks);
    } else {
      launch(element, std::false_type{}, blocks);
    }
    return cudaGetLastError();
  };
  switch (tile.element) {
    case ElementType::kFloat32:
      return for_columns(float{});
    case ElementType::kBFloat16:
      return for_columns(__nv_bfloat16{});
    default:
      return cudaErrorInvalidValue;
  }
}

Divisor queries_of(const PlainTile& tile) { return Divisor::of(static_cast<uint32_t>(tile.num_queries)); }

}  // namespace

cudaError_t plain_weights(const PlainTile& tile, const PlainWeights& results, cudaStream_t stream) {
  return for_tile(tile, [&](auto element, auto quads, unsigned blocks) {
    plain_weights_kernel<decltype(element), decltype(quads)::value>
        <<<blocks, kWarps * tile::kWarpSize, 0, stream>>>(tile, results, queries_of(tile));
  });
}

cudaError_t plain_gradients(const PlainTile& tile, const PlainGradients& gradients, cudaStream_t stream) {
  return for_tile(tile, [&](auto element, auto quads, unsigned blocks) {
    plain_gradients_kernel<decltype(element), decltype(quads)::value>
        <<<blocks, kWarps * tile::kWarpSize, 0, stream>>>(tile, gradients, queries_of(tile));
  });
}

}  // namespace flash_attn_ext::derivatives
