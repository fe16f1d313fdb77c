// Gradients of what all scores of a head share: sinks, and slopes, whose terms other kernels have summed in part.
#include "attention/division.h"
#include "attention/online_softmax.h"
#include "kernels/common/launch/launch_early.cuh"
#include "kernels/common/sums/sums.h"
#include "ptx/dependent_launch.h"
#include "tile/accumulator.h"

namespace flash_attn_ext::common {
namespace {

constexpr int kThreads = 256;

// dSink has a sum per head, over all queries of all batch entries. A warp adds the terms of a chunk of one sequence,
// and stores their sum in place of delta of the chunk's first query, which nothing reads any more. A CTA per head then
// adds the sums of chunks. Both add in a fixed order. Bound: memory, two numbers per row.
struct QueryChunks {
  static constexpr int kQueriesOfLane = 8;
  static constexpr int kQueries = kQueriesOfLane * tile::kWarpSize;
  static constexpr int kChunksOfCta = kThreads / tile::kWarpSize;

  int64_t of_sequence;  // of the longest
  int64_t of_head;
  int64_t ctas_of_head;

  struct Chunk {
    int64_t batch;
    int64_t row;          // of the first query
    int64_t num_queries;  // 0 or less: the sequence has fewer chunks than the longest
  };
  __device__ __forceinline__ Chunk at(const attention::BackwardParams& p, int64_t index) const {
    const int64_t batch = index / of_sequence;
    const int64_t first = (index - batch * of_sequence) * kQueries;
    const attention::Sequence sequence = p.sequences.at(batch);
    return {batch, sequence.query_begin + first, min(sequence.num_queries - first, int64_t{kQueries})};
  }
};

template <class Real>
__global__ void __launch_bounds__(kThreads) dsink_chunks_kernel(const __grid_constant__ attention::BackwardParams p,
                                                                const __grid_constant__ QueryChunks chunks) {
  constexpr int kQueries = QueryChunks::kQueriesOfLane;
  ptx::wait_for_kernel_before();
  ptx::allow_dependent_launch();
  const int64_t head = blockIdx.x / chunks.ctas_of_head;
  const int64_t index = (blockIdx.x - head * chunks.ctas_of_head) * QueryChunks::kChunksOfCta + tile::warp();
  if (index >= chunks.of_head) return;
  const QueryChunks::Chunk chunk = chunks.at(p, index);
  if (chunk.num_queries <= 0) return;
  const auto of_lane = [&](const attention::StatisticView& view) {
    return view.at<Real>(chunk.batch, head, chunk.row + tile::lane());
  };
  const auto exists = [&](int i) { return tile::lane() + i * tile::kWarpSize < chunk.num_queries; };
  // All loads are in flight together.
  Real lse[kQueries], delta[kQueries];
#pragma unroll
  for (int i = 0; i < kQueries; ++i) {
    lse[i] = exists(i) ? of_lane(p.lse)[i * tile::kWarpSize] : Real(INFINITY);
    delta[i] = exists(i) ? of_lane(p.delta)[i * tile::kWarpSize] : Real(0);
  }
  const Real sink = static_cast<const Real*>(p.sink)[head];
  double sum = 0.0;
#pragma unroll
  for (int i = 0; i < kQueries; ++i) {
    const auto optional = [&](const attention::StatisticView& view) {
      return view.present() && exists(i) ? of_lane(view)[i * tile::kWarpSize] : Real(0);
    };
    // A sink of -inf means no sink; then the LSE may be -inf, too.
    const Real probability = sink == -INFINITY ? Real(0) : exp((sink - lse[i]) - optional(p.lse_residual));
    const Real own = attention::delta_for_sink(sink, lse[i], delta[i], optional(p.dlse));
    if (probability != Real(0)) sum -= double{probability} * double{own};
  }
  sum = tile::sum_over_lanes<tile::kWarpSize>(sum);
  if (tile::lane() == 0) *of_lane(p.delta) = static_cast<Real>(sum);
}

// A thread adds every kThreads-th chunk in order; then a tree adds the threads' sums.
template <class Real>
__global__ void __launch_bounds__(kThreads)
    dsink_kernel(const __grid_constant__ attention::BackwardParams p, const __grid_constant__ QueryChunks chunks) {
  __shared__ double sums[kThreads];
  ptx::wait_for_kernel_before();
  const int64_t head = blockIdx.x;
  double sum = 0.0;
  for (int64_t index = threadIdx.x; index < chunks.of_head; index += kThreads) {
    const QueryChunks::Chunk chunk = chunks.at(p, index);
    if (chunk.num_queries > 0) sum += *p.delta.at<const Real>(chunk.batch, head, chunk.row);
  }
  sums[threadIdx.x] = sum;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) static_cast<Real*>(p.dsink)[head] = static_cast<Real>(sums[0]);
}

// One thread per (batch, head).
template <class Real>
__global__ void __launch_bounds__(kThreads)
    dalibi_kernel(const __grid_constant__ attention::BackwardParams p, const AlibiPartials partials) {
  const int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row >= p.batch * p.num_heads_q) return;
  const Real* of_head = static_cast<const Real*>(partials.data) + row * partials.per_head;
  double sum = 0.0;
  for (int64_t i = 0; i < partials.per_head; ++i) sum += of_head[i];
  static_cast<Real*>(p.dalibi_slopes)[row] = static_cast<Real>(sum);
}

template <class Real>
cudaError_t launch_dsink_as(const attention::BackwardParams& params, cudaStream_t stream) {
  const int64_t of_sequence = attention::ceil_div(params.sequences.max_seqlen_q, QueryChunks::kQueries);
  const int64_t of_head = params.batch * of_sequence;
  const QueryChunks chunks = {of_sequence, of_head, attention::ceil_div(of_head, QueryChunks::kChunksOfCta)};
  const int64_t blocks = params.num_heads_q * chunks.ctas_of_head;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  if (blocks > 0) {
    const cudaError_t error =
        launch_early(dsink_chunks_kernel<Real>, {.blocks = blocks, .threads = kThreads}, stream, params, chunks);
    if (error != cudaSuccess) return error;
  }
  return launch_early(dsink_kernel<Real>, {.blocks = params.num_heads_q, .threads = kThreads}, stream, params, chunks);
}

bool in_float64(const attention::BackwardParams& params) { return params.element == attention::ElementType::kFloat64; }

}  // namespace

cudaError_t launch_dsink(const attention::BackwardParams& params, cudaStream_t stream) {
  return in_float64(params) ? launch_dsink_as<double>(params, stream) : launch_dsink_as<float>(params, stream);
}

cudaError_t launch_dalibi(const attention::BackwardParams& params, const AlibiPartials& partials, cudaStream_t stream) {
  const int64_t blocks = attention::ceil_div(params.batch * params.num_heads_q, kThreads);
  const auto kernel = in_float64(params) ? dalibi_kernel<double> : dalibi_kernel<float>;
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(params, partials);
  return cudaGetLastError();
}

}  // namespace flash_attn_ext::common
