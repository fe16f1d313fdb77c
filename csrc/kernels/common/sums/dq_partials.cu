// dQ[query] = scale * (sum of its partial dQ, in ascending order), in q's dtype.
//
// Grid: one warp per (batch, query head, query, kColumns columns); a lane has two neighbouring columns. The kernel is
// latency-bound, since partial dQ lie in L2, so kAhead loads are in flight at a time.
#include "attention/division.h"
#include "kernels/common/rows/attention_rows.cuh"
#include "kernels/common/sums/sums.h"

namespace flash_attn_ext::common {
namespace {

using attention::Divisor;

constexpr int kWarps = 4;
constexpr int kColumns = 2 * kWarpSize;
constexpr int kAhead = 8;

struct SumGrid {
  Divisor slices;   // of a row
  Divisor queries;  // of a head, at most
  Divisor heads;
};

// Sums two columns.
__device__ __forceinline__ float2 sum_of_partials(const float* first, const DqPartials& partials) {
  float2 sum = {0.0f, 0.0f};
#pragma unroll 1
  for (int split = 0; split < partials.count; split += kAhead) {
    float2 ahead[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const bool exists = split + i < partials.count;
      ahead[i] = exists ? *reinterpret_cast<const float2*>(first + (split + i) * partials.stride) : float2{0.0f, 0.0f};
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      sum.x += ahead[i].x;
      sum.y += ahead[i].y;
    }
  }
  return sum;
}

template <class Element>
__global__ void __launch_bounds__(kWarps* kWarpSize)
    sum_dq_partials_kernel(const __grid_constant__ attention::BackwardParams p,
                           const __grid_constant__ DqPartials partials, const __grid_constant__ SumGrid grid) {
  const uint32_t index = blockIdx.x * kWarps + tile::warp();
  const uint32_t row = grid.slices.quotient(index);
  const uint32_t head_index = grid.queries.quotient(row);
  const uint32_t batch = grid.heads.quotient(head_index);
  const uint32_t query = row - head_index * grid.queries.divisor;
  if (batch >= p.batch) return;
  const attention::Sequence sequence = p.sequences.at(batch);
  if (query >= sequence.num_queries) return;
  const HeadRows coord = head_rows(p, sequence, head_index - batch * grid.heads.divisor);
  const RowPlace place = coord.query_row(query);
  const int first_column = static_cast<int>(index - row * grid.slices.divisor) * kColumns;
  const int column = first_column + 2 * tile::lane();
  const float2 sum = sum_of_partials(partials.row(0, place.batch, place.head, place.row) + column, partials);
  const auto scale = static_cast<float>(p.score_mod.scale);
  Element* target = p.dq.row<Element>(place.batch, place.head, place.row) + column * p.dq.column_stride;
  bool has_nan = false;
  if (column < p.head_dim_qk) {
    target[0] = Element(sum.x * scale);
    has_nan = sum.x != sum.x;
  }
  if (column + 1 < p.head_dim_qk) {
    target[p.dq.column_stride] = Element(sum.y * scale);
    has_nan |= sum.y != sum.y;
  }
  if (__any_sync(kAllLanes, has_nan)) compute_dq_row<Element>(p, coord, query, {first_column, first_column + kColumns});
}

template <class Element>
cudaError_t launch(const attention::BackwardParams& p, const DqPartials& partials, cudaStream_t stream) {
  const int64_t slices = attention::ceil_div(p.head_dim_qk, kColumns);
  const int64_t warps = p.batch * p.num_heads_q * p.sequences.max_seqlen_q * slices;
  if (warps == 0) return cudaSuccess;
  if (warps > INT32_MAX - kWarps) return cudaErrorInvalidConfiguration;
  const auto divisor = [](int64_t n) { return Divisor::of(static_cast<uint32_t>(n)); };
  const SumGrid grid = {divisor(slices), divisor(p.sequences.max_seqlen_q), divisor(p.num_heads_q)};
  const auto blocks = static_cast<unsigned>(attention::ceil_div(warps, kWarps));
  sum_dq_partials_kernel<Element><<<blocks, kWarps * kWarpSize, 0, stream>>>(p, partials, grid);
  return cudaGetLastError();
}

}  // namespace

cudaError_t sum_dq_partials(const attention::BackwardParams& params, const DqPartials& partials, cudaStream_t stream) {
  switch (params.element) {
    case attention::ElementType::kFloat32:
      return launch<float>(params, partials, stream);
    case attention::ElementType::kBFloat16:
      return launch<__nv_bfloat16>(params, partials, stream);
    case attention::ElementType::kFloat16:
      return launch<__half>(params, partials, stream);
    default:  // float64 has one warp per row
      return cudaErrorInvalidValue;
  }
}

}  // namespace flash_attn_ext::common
