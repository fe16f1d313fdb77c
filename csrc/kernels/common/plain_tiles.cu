// The two elementwise stages of a plain tile: P and P dS of products, then P', dS and dS' of products and dP.
//
// Grid: one warp per row. A lane has 4 neighbouring columns at a time, or 1 where rows do not begin at multiples of 16
// bytes; a row is summed in the lane's order, then in a fixed butterfly order. Bound: memory. Each element is read once
// and written once; where a row sees none of a lane's columns, they are not read.
#include "attention/divisor.h"
#include "kernels/common/plain_tiles.h"
#include "ptx/math.h"
#include "tile/accumulator.h"

namespace flash_attn_ext::common {
namespace {

using attention::Divisor;
using attention::ElementType;

constexpr int kWarps = 4;
constexpr float kLog2e = 1.44269504088896341f;

// Neighbouring columns of a row, as a lane has them.
template <int kCount>
struct alignas(kCount * sizeof(float)) Columns {
  float at[kCount];
};

// One warp's row.
struct Row {
  int64_t index;
  int64_t offset;    // of its first element
  int first_column;  // that it sees
  int end_column;

  __device__ __forceinline__ bool sees(int column) const { return first_column <= column && column < end_column; }
  __device__ __forceinline__ bool sees_any(int column, int count) const {
    return first_column < column + count && column < end_column;
  }
};

__device__ __forceinline__ Row row_of(const PlainTile& tile, const Divisor& queries) {
  const uint32_t index = blockIdx.x * kWarps + tile::warp();
  const int query = static_cast<int>(index - queries.quotient(index) * queries.divisor);
  return {index, int64_t{index} * tile.num_columns, tile.band.first_column(query), tile.band.end_column(query)};
}

// Zeros where there is no tensor.
template <int kCount>
__device__ __forceinline__ Columns<kCount> load(const float* tensor, int64_t offset) {
  return tensor == nullptr ? Columns<kCount>{} : *reinterpret_cast<const Columns<kCount>*>(tensor + offset);
}

// Nothing where there is no tensor.
template <class Element, int kCount>
__device__ __forceinline__ void store(void* tensor, int64_t offset, const Columns<kCount>& values) {
  if (tensor == nullptr) return;
  Element* target = static_cast<Element*>(tensor) + offset;
  if constexpr (sizeof(Element) == sizeof(float)) {
    *reinterpret_cast<Columns<kCount>*>(target) = values;
  } else if constexpr (kCount == 4) {
    *reinterpret_cast<uint2*>(target) = {ptx::pack(values.at[0], values.at[1], Element{}),
                                         ptx::pack(values.at[2], values.at[3], Element{})};
  } else {
    *target = Element(values.at[0]);
  }
}

// P and dS of a product and its tangent. The difference of score and LSE comes first: both may be large.
struct Weight {
  float weight;
  float score_tangent;
};
__device__ __forceinline__ Weight weigh(const PlainTile& tile, float lse, float product, float product_tangent) {
  return {ptx::exp2(fmaf(product, tile.scale, -lse) * kLog2e), tile.scale * product_tangent};
}

template <class Element, int kCount>
__global__ void __launch_bounds__(kWarps* tile::kWarpSize)
    plain_weights_kernel(const __grid_constant__ PlainTile tile, const __grid_constant__ PlainWeights results,
                         const __grid_constant__ Divisor queries) {
  const Row row = row_of(tile, queries);
  if (row.index >= tile.num_rows) return;
  const float lse = tile.lse[row.index];
  float sum = 0.0f;
#pragma unroll 2
  for (int column = tile::lane() * kCount; column < tile.num_columns; column += tile::kWarpSize * kCount) {
    const int64_t offset = row.offset + column;
    Columns<kCount> weights = {};
    Columns<kCount> weighted = {};
    if (row.sees_any(column, kCount)) {
      const Columns<kCount> products = load<kCount>(tile.products, offset);
      const Columns<kCount> tangents = load<kCount>(tile.product_tangents, offset);
#pragma unroll
      for (int e = 0; e < kCount; ++e) {
        if (!row.sees(column + e)) continue;  // chosen, not multiplied by 0: it may be NaN
        const Weight of = weigh(tile, lse, products.at[e], tangents.at[e]);
        weights.at[e] = of.weight;
        weighted.at[e] = of.weight * of.score_tangent;
        sum += weighted.at[e];
      }
    }
    store<Element>(results.weights, offset, weights);
    store<Element>(results.weighted, offset, weighted);
  }
#pragma unroll
  for (int lanes = tile::kWarpSize / 2; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, lanes);
  if (tile::lane() == 0) results.lse_tangent[row.index] += sum;
}

template <class Element, int kCount>
__global__ void __launch_bounds__(kWarps* tile::kWarpSize)
    plain_gradients_kernel(const __grid_constant__ PlainTile tile, const __grid_constant__ PlainGradients gradients,
                           const __grid_constant__ Divisor queries) {
  const Row row = row_of(tile, queries);
  if (row.index >= tile.num_rows) return;
  const float lse = tile.lse[row.index];
  const float lse_tangent = gradients.lse_tangent[row.index];
  const float delta = gradients.delta[row.index];
  const float delta_tangent = gradients.delta_tangent[row.index];
  for (int column = tile::lane() * kCount; column < tile.num_columns; column += tile::kWarpSize * kCount) {
    const int64_t offset = row.offset + column;
    Columns<kCount> weight_tangents = {};
    Columns<kCount> score_gradients = {};
    Columns<kCount> score_gradient_tangents = {};
    if (row.sees_any(column, kCount)) {
      const Columns<kCount> products = load<kCount>(tile.products, offset);
      const Columns<kCount> tangents = load<kCount>(tile.product_tangents, offset);
      const Columns<kCount> of_weights = load<kCount>(gradients.weight_gradients, offset);
      const Columns<kCount> of_weights_tangents = load<kCount>(gradients.weight_gradient_tangents, offset);
#pragma unroll
      for (int e = 0; e < kCount; ++e) {
        if (!row.sees(column + e)) continue;  // chosen, not multiplied by 0: it may be NaN
        const Weight of = weigh(tile, lse, products.at[e], tangents.at[e]);
        const float weight_tangent = of.weight * (of.score_tangent - lse_tangent);
        const float above = of_weights.at[e] - delta;
        const float above_tangent = of_weights_tangents.at[e] - delta_tangent;
        weight_tangents.at[e] = weight_tangent;
        score_gradients.at[e] = of.weight * above;
        score_gradient_tangents.at[e] = fmaf(weight_tangent, above, of.weight * above_tangent);
      }
    }
    store<Element>(gradients.weight_tangents, offset, weight_tangents);
    store<Element>(gradients.score_gradients, offset, score_gradients);
    store<Element>(gradients.score_gradient_tangents, offset, score_gradient_tangents);
  }
}

// launch(Element, number of columns of a lane, blocks) for the tile's.
template <class Launch>
cudaError_t for_tile(const PlainTile& tile, const Launch& launch) {
  if (tile.num_rows == 0 || tile.num_columns == 0) return cudaSuccess;
  if (tile.num_rows > INT32_MAX - kWarps) return cudaErrorInvalidConfiguration;
  const auto blocks = static_cast<unsigned>((tile.num_rows + kWarps - 1) / kWarps);
  const auto for_columns = [&](auto element) {
    if (tile.num_columns % 4 == 0) {
      launch(element, std::integral_constant<int, 4>{}, blocks);
    } else {
      launch(element, std::integral_constant<int, 1>{}, blocks);
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
  return for_tile(tile, [&](auto element, auto count, unsigned blocks) {
    plain_weights_kernel<decltype(element), decltype(count)::value>
        <<<blocks, kWarps * tile::kWarpSize, 0, stream>>>(tile, results, queries_of(tile));
  });
}

cudaError_t plain_gradients(const PlainTile& tile, const PlainGradients& gradients, cudaStream_t stream) {
  return for_tile(tile, [&](auto element, auto count, unsigned blocks) {
    plain_gradients_kernel<decltype(element), decltype(count)::value>
        <<<blocks, kWarps * tile::kWarpSize, 0, stream>>>(tile, gradients, queries_of(tile));
  });
}

}  // namespace flash_attn_ext::common
