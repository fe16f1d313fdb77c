// The float64 kernels: rows as in attention_rows.cuh, one warp each, and sums of dS for biases and ALiBi slopes.
//
// Grid: kWarpsPerBlock rows per CTA, numbered (batch, head, row), with a grid-stride loop where they outnumber the
// largest grid. dBias: one CTA for each owner of elements of the bias, see below. The kernels are bound by the float64
// pipe and by shuffles.
#include <algorithm>

#include "attention/division.h"
#include "kernels/common/float64/float64_attention.h"
#include "kernels/common/rows/attention_rows.cuh"

namespace flash_attn_ext::common {
namespace {

constexpr int kWarpsPerBlock = 4;
constexpr int kThreads = kWarpsPerBlock * kWarpSize;

// Calls function(sequence, head, row) for the calling warp's share of (batch, head, row).
template <class Function>
__device__ __forceinline__ void for_each_row(const attention::AttentionParams& p, int64_t num_heads, int64_t length,
                                             Function&& function) {
  const int64_t num_rows = p.batch * num_heads * length;
  const int64_t step = int64_t{gridDim.x} * kWarpsPerBlock;
  for (int64_t index = int64_t{blockIdx.x} * kWarpsPerBlock + tile::warp(); index < num_rows; index += step) {
    const attention::Sequence sequence = p.sequence_of(index / length / num_heads);
    function(sequence, index / length % num_heads, index % length);
  }
}

template <class Keys>
__global__ void __launch_bounds__(kThreads) forward_kernel(const __grid_constant__ attention::ForwardParams p) {
  for_each_row(p, p.num_heads_q, p.sequences.max_seqlen_q,
               [&](const attention::Sequence& sequence, int64_t head, int64_t query) {
                 if (query < sequence.num_queries)
                   compute_forward_row<double, Keys>(p, head_rows(p, sequence, head), query, {});
               });
}

__global__ void __launch_bounds__(kThreads) dq_kernel(const __grid_constant__ attention::BackwardParams p) {
  for_each_row(p, p.num_heads_q, p.sequences.max_seqlen_q,
               [&](const attention::Sequence& sequence, int64_t head, int64_t query) {
                 if (query < sequence.num_queries) compute_dq_row<double>(p, head_rows(p, sequence, head), query, {});
               });
}

__global__ void __launch_bounds__(kThreads) dkdv_kernel(const __grid_constant__ attention::BackwardParams p) {
  for_each_row(p, p.num_heads_k, p.sequences.max_seqlen_k,
               [&](const attention::Sequence& sequence, int64_t key_head, int64_t key) {
                 if (key < sequence.num_keys) compute_dkdv_row<double>(p, sequence, key_head, key, {});
               });
}

__global__ void __launch_bounds__(kThreads)
    dalibi_kernel(const __grid_constant__ attention::BackwardParams p, const AlibiPartials partials) {
  for_each_row(p, p.num_heads_q, p.sequences.max_seqlen_q,
               [&](const attention::Sequence& sequence, int64_t head, int64_t query) {
                 attention::Interval seen = {0, 0};
                 if (query < sequence.num_queries) seen = p.visibility.keys_of(query, sequence);
                 const int64_t diagonal = p.visibility.diagonal(sequence);
                 double sum = 0.0;
                 for (int64_t first = seen.begin; first < seen.end; first += kWarpSize) {
                   const double dscore =
                       gradients_of_query<double>(p, head_rows(p, sequence, head), query, first).dscore;
                   const int64_t key = first + tile::lane();
                   sum += dscore * static_cast<double>(attention::alibi_derivative(query, key, diagonal));
                 }
                 sum = sum_over_warp(sum);
                 const int64_t row = (sequence.batch * p.num_heads_q + head) * partials.per_head + query;
                 if (tile::lane() == 0) static_cast<double*>(partials.data)[row] = sum;
               });
}

template <class... Arguments>
cudaError_t launch_rows(void (*kernel)(Arguments...), int64_t rows, cudaStream_t stream,
                        const Arguments&... arguments) {
  if (rows == 0) return cudaSuccess;
  const int64_t blocks = std::min<int64_t>(attention::ceil_div(rows, kWarpsPerBlock), INT32_MAX);
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(arguments...);
  return cudaGetLastError();
}

int64_t num_query_rows(const attention::AttentionParams& p) {
  return p.batch * p.num_heads_q * p.sequences.max_seqlen_q;
}

// One dimension of the bias. A CTA owns one index of it, or sums over all of them where the bias is broadcast.
struct BiasAxis {
  bool owned;
  int64_t length;

  __host__ __device__ int64_t num_owners() const { return owned ? length : 1; }
  __host__ __device__ int64_t num_summed() const { return owned ? 1 : length; }
  __device__ int64_t at(int64_t owner, int64_t summed) const { return owned ? owner : summed; }
};

struct BiasAxes {
  BiasAxis batches, heads, queries;
  int64_t key_groups;  // of 32 keys, one per lane

  __host__ __device__ explicit BiasAxes(const attention::BackwardParams& p)
      : batches{p.dbias.per_batch, p.batch},
        heads{p.dbias.per_head, p.num_heads_q},
        queries{p.dbias.per_query, p.sequences.max_seqlen_q},
        key_groups(attention::ceil_div(p.sequences.max_seqlen_k, kWarpSize)) {}

  __host__ __device__ int64_t num_owners() const {
    return batches.num_owners() * heads.num_owners() * queries.num_owners() * key_groups;
  }
  __host__ __device__ int64_t num_summed() const {
    return batches.num_summed() * heads.num_summed() * queries.num_summed();
  }
};

// dS of one query and of the lane's key of a group.
__device__ __forceinline__ double dscore_of_query(const attention::BackwardParams& p, const attention::Coordinate& at) {
  const attention::Sequence sequence = p.sequences.at(at.batch);
  if (at.query >= sequence.num_queries) return 0.0;
  return gradients_of_query<double>(p, head_rows(p, sequence, at.head), at.query, at.key).dscore;
}

// One CTA per owner. Its warps share the summed indices round-robin, and their sums are added in order.
__global__ void __launch_bounds__(kThreads) dbias_kernel(const __grid_constant__ attention::BackwardParams p) {
  __shared__ double sums[kWarpsPerBlock][kWarpSize];
  const BiasAxes axes(p);
  const int num_warps = static_cast<int>(blockDim.x) / kWarpSize;
  for (int64_t owner = blockIdx.x; owner < axes.num_owners(); owner += gridDim.x) {
    const int64_t first_key = owner % axes.key_groups * kWarpSize;
    const int64_t row = owner / axes.key_groups;
    const int64_t query = row % axes.queries.num_owners();
    const int64_t head = row / axes.queries.num_owners() % axes.heads.num_owners();
    const int64_t batch = row / axes.queries.num_owners() / axes.heads.num_owners();
    double sum = 0.0;
    for (int64_t summed = tile::warp(); summed < axes.num_summed(); summed += num_warps) {
      const int64_t summed_row = summed / axes.queries.num_summed();
      const int64_t summed_batch = summed_row / axes.heads.num_summed();
      sum += dscore_of_query(
          p, {axes.batches.at(batch, summed_batch), axes.heads.at(head, summed_row % axes.heads.num_summed()),
              axes.queries.at(query, summed % axes.queries.num_summed()), first_key});
    }
    sums[tile::warp()][tile::lane()] = sum;
    __syncthreads();
    if (tile::warp() == 0) {
      for (int w = 1; w < num_warps; ++w) sum += sums[w][tile::lane()];
      const int64_t key = first_key + tile::lane();
      if (key < p.sequences.max_seqlen_k) {
        static_cast<double*>(p.dbias.data)[batch * p.dbias.batch_stride + head * p.dbias.head_stride +
                                           query * p.dbias.query_stride + key * p.dbias.key_stride] = sum;
      }
    }
    __syncthreads();
  }
}

// A warp computes 32 neighbouring values of a head's relative-position bias: it adds the dS of their diagonals query by
// query.
__global__ void __launch_bounds__(kThreads) relative_dbias_kernel(const __grid_constant__ attention::BackwardParams p) {
  const attention::SequenceTable& lengths = p.sequences;
  const int64_t diagonals = lengths.max_seqlen_q + lengths.max_seqlen_k - 1;
  const int64_t groups = attention::ceil_div(diagonals, kWarpSize);
  const int64_t num_heads = p.dbias.per_head ? p.num_heads_q : 1;
  const int64_t step = int64_t{gridDim.x} * kWarpsPerBlock;
  for (int64_t index = int64_t{blockIdx.x} * kWarpsPerBlock + tile::warp(); index < num_heads * groups; index += step) {
    const int64_t bias_head = index / groups;
    const int64_t first = index % groups * kWarpSize - (lengths.max_seqlen_q - 1);
    double sum = 0.0;
    for (int64_t entry = 0; entry < p.batch * (p.dbias.per_head ? 1 : p.num_heads_q); ++entry) {
      const int64_t head = p.dbias.per_head ? bias_head : entry / p.batch;
      const int64_t end = min(lengths.max_seqlen_q, lengths.max_seqlen_k - first);
      for (int64_t query = max(int64_t{0}, 1 - kWarpSize - first); query < end; ++query) {
        sum += dscore_of_query(p, {entry % p.batch, head, query, first + query});
      }
    }
    const int64_t diagonal = first + tile::lane();
    if (diagonal < lengths.max_seqlen_k) {
      static_cast<double*>(p.dbias.data)[bias_head * p.dbias.head_stride + diagonal] = sum;
    }
  }
}

}  // namespace

cudaError_t launch_forward_float64(const attention::ForwardParams& params, cudaStream_t stream) {
  const auto kernel = params.cache.present() ? forward_kernel<AnyKeys> : forward_kernel<OwnKeys>;
  return launch_rows(kernel, num_query_rows(params), stream, params);
}

cudaError_t launch_dkdv_float64(const attention::BackwardParams& params, cudaStream_t stream) {
  return launch_rows(dkdv_kernel, params.batch * params.num_heads_k * params.sequences.max_seqlen_k, stream, params);
}

cudaError_t launch_dq_float64(const attention::BackwardParams& params, cudaStream_t stream) {
  return launch_rows(dq_kernel, num_query_rows(params), stream, params);
}

cudaError_t launch_dbias_float64(const attention::BackwardParams& params, cudaStream_t stream) {
  const BiasAxes axes(params);
  const int64_t owners = axes.num_owners();
  if (owners == 0) return cudaSuccess;
  const int64_t warps = std::clamp<int64_t>(axes.num_summed(), 1, kWarpsPerBlock);
  dbias_kernel<<<static_cast<unsigned>(std::min<int64_t>(owners, INT32_MAX)), static_cast<unsigned>(warps * kWarpSize),
                 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t launch_relative_dbias_float64(const attention::BackwardParams& params, cudaStream_t stream) {
  const attention::SequenceTable& lengths = params.sequences;
  if (lengths.max_seqlen_q == 0 || lengths.max_seqlen_k == 0) return cudaSuccess;
  const int64_t groups = attention::ceil_div(lengths.max_seqlen_q + lengths.max_seqlen_k - 1, int64_t{kWarpSize});
  return launch_rows(relative_dbias_kernel, (params.dbias.per_head ? params.num_heads_q : 1) * groups, stream, params);
}

cudaError_t launch_dalibi_partials_float64(const attention::BackwardParams& params, const AlibiPartials& partials,
                                           cudaStream_t stream) {
  return launch_rows(dalibi_kernel, num_query_rows(params), stream, params, partials);
}

}  // namespace flash_attn_ext::common
