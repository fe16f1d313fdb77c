// Biases that are broadcast along queries: a scan for the forward pass, a count of keys for the backward pass, which
// also zeroes the gradients of the keys that are left out, and masks that are written as biases.
//
// The scan of a bias finds the batch entries to which it leaves one interval of keys, as padding that is added to
// scores does (attention::KeyInterval). There the bias of every key of the interval is 0, and that of all others is
// -inf. All heads must have the same interval.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "attention/key_bias.h"
#include "kernels/common/launch/launch_early.cuh"
#include "kernels/common/masks/key_bias.h"
#include "kernels/common/rows/warp_rows.cuh"
#include "ptx/dependent_launch.h"
#include "tile/accumulator.h"

namespace flash_attn_ext::common {
namespace {

constexpr int kThreads = 512;
constexpr uint32_t kAllLanes = 0xFFFFFFFFu;

// The keys of a head whose bias is 0.
struct KeysOfHead {
  int first = INT32_MAX;
  int last = -1;
  int count = 0;
  bool hides_others = true;

  __device__ __forceinline__ void add(int key, float bias) {
    if (bias == 0.0f) {
      first = min(first, key);
      last = max(last, key);
      ++count;
    } else {
      hides_others &= bias == -INFINITY;
    }
  }

  __device__ __forceinline__ attention::KeyInterval interval(bool from_first_key) const {
    const int begin = __reduce_min_sync(kAllLanes, first);
    const int keys = __reduce_add_sync(kAllLanes, count);
    const int end = __reduce_max_sync(kAllLanes, last) + 1;
    const bool is_padding = __all_sync(kAllLanes, hides_others) != 0;
    if (is_padding && keys == 0) return {0, 0};
    const bool is_interval = is_padding && end - begin == keys && (begin == 0 || !from_first_key);
    return {begin, is_interval ? keys : attention::KeyInterval::kNone};
  }
};

// The scan. Grid: one CTA for each batch entry. A warp has a head at a time. Bound: the latency of accesses to memory.
template <class Element>
__global__ void __launch_bounds__(kThreads)
    key_bias_kernel(const __grid_constant__ attention::BasicForwardParams p, attention::KeyInterval* intervals) {
  constexpr int kWarps = kThreads / tile::kWarpSize;
  __shared__ attention::KeyInterval of_warps[kWarps];
  ptx::wait_for_kernel_before();
  ptx::allow_dependent_launch();
  const attention::BroadcastView& bias = p.score_mod.bias;
  const int64_t batch = blockIdx.x;
  const int heads = bias.head_stride != 0 ? static_cast<int>(p.num_heads_q) : 1;
  const auto num_keys = static_cast<int>(p.sequences.max_seqlen_k);
  const auto same = [](const attention::KeyInterval& a, const attention::KeyInterval& b) {
    return a.begin == b.begin && a.count == b.count;
  };
  const int warp = tile::warp();
  attention::KeyInterval found{};
  // A warp without a head of its own has the one of another warp.
  for (int head = warp % heads, step = 0; head < heads; head += kWarps, ++step) {
    const auto* const row = static_cast<const Element*>(bias.data) + bias.offset({batch, head, 0, 0});
    KeysOfHead keys;
#pragma unroll 8
    for (int key = tile::lane(); key < num_keys; key += tile::kWarpSize) keys.add(key, static_cast<float>(row[key]));
    const attention::KeyInterval own = keys.interval(p.dropout.enabled());
    found = step == 0 || same(found, own) ? own : attention::KeyInterval{0, attention::KeyInterval::kNone};
    if (!found.exists()) break;
  }
  if (tile::lane() == 0) of_warps[warp] = found;
  __syncthreads();
  bool agree = found.exists();
  for (int w = 0; w < kWarps; ++w) agree &= same(of_warps[w], found);
  if (threadIdx.x == 0) intervals[batch] = {found.begin, agree ? found.count : attention::KeyInterval::kNone};
  if (!p.lse_residual.present()) return;
  // The kernels of intervals write no residual. The other launch replaces those of its batch entries.
  const auto queries = static_cast<int>(p.sequences.max_seqlen_q);
  for (int head = warp; head < p.num_heads_q; head += kWarps) {
    for (int query = tile::lane(); query < queries; query += tile::kWarpSize) {
      *p.lse_residual.at<float>(batch, head, query) = 0.0f;
    }
  }
}

// Zeroes rows from `first` to `end` of a head.
template <class Element>
__device__ __forceinline__ void clear_rows(const attention::MatrixView& to, int64_t batch, int64_t head, int first,
                                           int end, int64_t columns) {
  if (to.data == nullptr) return;
  for (int row = first + tile::warp(); row < end; row += kThreads / tile::kWarpSize) {
    Element* const elements = to.row<Element>(batch, head, row);
    for (int64_t i = tile::lane(); i < columns; i += tile::kWarpSize) elements[i * to.column_stride] = Element(0.0f);
  }
}

// Counts the keys before those at the end that the bias hides. Grid: one CTA for each key head of a batch entry; each
// counts them, since it has to know them. Bound: the latency of accesses to memory.
template <class Element>
__global__ void __launch_bounds__(kThreads)
    keys_before_padding_kernel(const __grid_constant__ attention::BackwardParams p, int32_t* counts) {
  ptx::wait_for_kernel_before();
  ptx::allow_dependent_launch();
  const int64_t batch = blockIdx.x / p.num_heads_k;
  const int64_t head = blockIdx.x - batch * p.num_heads_k;
  const attention::BroadcastView& bias = p.score_mod.bias;
  const auto* const row = static_cast<const Element*>(bias.data) + bias.offset({batch, 0, 0, 0});
  const auto keys = static_cast<int>(p.sequences.max_seqlen_k);
  int own = 0;
#pragma unroll 4
  for (int key = static_cast<int>(threadIdx.x); key < keys; key += kThreads) {
    if (static_cast<float>(row[key]) != -INFINITY) own = key + 1;
  }
  __shared__ int of_warps[kThreads / tile::kWarpSize];
  own = __reduce_max_sync(kAllLanes, own);
  if (tile::lane() == 0) of_warps[tile::warp()] = own;
  __syncthreads();
  int count = 0;
  for (const int of_warp : of_warps) count = max(count, of_warp);
  if (head == 0 && threadIdx.x == 0) counts[batch] = count;
  clear_rows<Element>(p.dk, batch, head, count, keys, p.head_dim_qk);
  clear_rows<Element>(p.dv, batch, head, count, keys, p.head_dim_v);
}

// Writes 0 and -inf for a mask of keys. Grid: one CTA for each row of the bias.
template <class Element>
__global__ void __launch_bounds__(kThreads)
    mask_as_bias_kernel(const __grid_constant__ attention::AttentionParams p, Element* to) {
  ptx::wait_for_kernel_before();
  ptx::allow_dependent_launch();
  const attention::BroadcastView& mask = p.score_mod.mask;
  const int64_t heads = attention::key_bias_heads(p);
  const int64_t batch = blockIdx.x / heads;
  const auto* const row =
      static_cast<const uint8_t*>(mask.data) + mask.offset({batch, blockIdx.x - batch * heads, 0, 0});
  const int64_t keys = p.sequences.max_seqlen_k;
  Element* const to_row = to + blockIdx.x * keys;
  for (int64_t key = threadIdx.x; key < keys; key += kThreads) {
    to_row[key] = Element(row[key * mask.key_stride] != 0 ? 0.0f : -INFINITY);
  }
}

// Writes KeyBiasMaxima. Grid: one CTA for each row. Each warp has kKeys keys at a time. Where maxima are running, the
// first warp then replaces them. Bound: the latency of accesses to memory.
template <class Element>
__global__ void __launch_bounds__(kThreads)
    key_bias_maxima_kernel(const __grid_constant__ attention::AttentionParams p, bool running, float* maxima) {
  constexpr int kWarps = kThreads / tile::kWarpSize;
  constexpr int kKeys = attention::KeyBiasMaxima::kKeys;
  ptx::wait_for_kernel_before();
  ptx::allow_dependent_launch();
  const auto rows = attention::Float32KeyBias::of(p);
  const int64_t of_row = attention::KeyBiasMaxima::of_row(rows.keys);
  const int64_t batch = blockIdx.x / rows.heads;
  const attention::BroadcastView& bias = p.score_mod.bias;
  const auto* const row =
      static_cast<const Element*>(bias.data) + bias.offset({batch, blockIdx.x - batch * rows.heads, 0, 0});
  float* const to = maxima + blockIdx.x * of_row;
  for (int64_t i = tile::warp(); i < of_row; i += kWarps) {
    float largest = -INFINITY;
#pragma unroll
    for (int step = 0; step < kKeys; step += tile::kWarpSize) {
      const int64_t key = i * kKeys + step + tile::lane();
      if (key < rows.keys) largest = fmaxf(largest, static_cast<float>(row[key]));
    }
    largest = maximum_over_warp(largest);
    if (tile::lane() == 0) to[i] = largest;
  }
  if (!running) return;
  __syncthreads();
  if (tile::warp() != 0) return;
  float before = -INFINITY;
  for (int64_t first = 0; first < of_row; first += tile::kWarpSize) {
    const int64_t i = first + tile::lane();
    float largest = fmaxf(before, i < of_row ? to[i] : -INFINITY);
#pragma unroll
    for (int offset = 1; offset < tile::kWarpSize; offset *= 2) {
      const float other = __shfl_up_sync(kAllLanes, largest, offset);
      if (tile::lane() >= offset) largest = fmaxf(largest, other);
    }
    before = __shfl_sync(kAllLanes, largest, tile::kWarpSize - 1);
    if (i < of_row) to[i] = fabsf(largest) < attention::kLeastDominant ? largest : 0.0f;
  }
}

// Writes a bias in float32. Grid: one CTA for each row of the copy.
template <class Element>
__global__ void __launch_bounds__(kThreads)
    copy_key_bias_kernel(const __grid_constant__ attention::AttentionParams p, float* to) {
  ptx::wait_for_kernel_before();
  ptx::allow_dependent_launch();
  const attention::BroadcastView& bias = p.score_mod.bias;
  const auto copy = attention::Float32KeyBias::of(p);
  const int64_t batch = blockIdx.x / copy.heads;
  const auto* const row =
      static_cast<const Element*>(bias.data) + bias.offset({batch, blockIdx.x - batch * copy.heads, 0, 0});
  float* const to_row = to + blockIdx.x * copy.keys;
  for (int64_t key = threadIdx.x; key < copy.keys; key += kThreads) {
    to_row[key] = static_cast<float>(row[key * bias.key_stride]);
  }
}

}  // namespace

cudaError_t write_key_bias_maxima(const attention::AttentionParams& p, bool running, float* to, cudaStream_t stream) {
  const EarlyLaunch launch = {.blocks = attention::Float32KeyBias::of(p).rows(), .threads = kThreads};
  switch (p.score_mod.bias.element) {
    case attention::ElementType::kBFloat16:
      return launch_early(key_bias_maxima_kernel<__nv_bfloat16>, launch, stream, p, running, to);
    case attention::ElementType::kFloat16:
      return launch_early(key_bias_maxima_kernel<__half>, launch, stream, p, running, to);
    default:
      return launch_early(key_bias_maxima_kernel<float>, launch, stream, p, running, to);
  }
}

cudaError_t copy_key_bias(const attention::AttentionParams& p, float* to, cudaStream_t stream) {
  const EarlyLaunch launch = {.blocks = attention::Float32KeyBias::of(p).rows(), .threads = kThreads};
  return p.score_mod.bias.element == attention::ElementType::kBFloat16
             ? launch_early(copy_key_bias_kernel<__nv_bfloat16>, launch, stream, p, to)
             : launch_early(copy_key_bias_kernel<__half>, launch, stream, p, to);
}

cudaError_t write_mask_as_bias(const attention::AttentionParams& p, void* to, cudaStream_t stream) {
  const common::EarlyLaunch launch = {.blocks = attention::key_bias_rows(p), .threads = kThreads};
  return p.element == attention::ElementType::kBFloat16
             ? launch_early(mask_as_bias_kernel<__nv_bfloat16>, launch, stream, p, static_cast<__nv_bfloat16*>(to))
             : launch_early(mask_as_bias_kernel<__half>, launch, stream, p, static_cast<__half*>(to));
}

cudaError_t count_keys_before_padding(const attention::BackwardParams& params, int32_t* counts, cudaStream_t stream) {
  const auto kernel = params.element == attention::ElementType::kBFloat16 ? keys_before_padding_kernel<__nv_bfloat16>
                                                                          : keys_before_padding_kernel<__half>;
  return launch_early(kernel, {.blocks = params.batch * params.num_heads_k, .threads = kThreads}, stream, params,
                      counts);
}

cudaError_t scan_key_bias(const attention::BasicForwardParams& params, attention::KeyInterval* intervals,
                          cudaStream_t stream) {
  const auto kernel =
      params.element == attention::ElementType::kBFloat16 ? key_bias_kernel<__nv_bfloat16> : key_bias_kernel<__half>;
  return launch_early(kernel, {.blocks = params.batch, .threads = kThreads}, stream, params, intervals);
}

}  // namespace flash_attn_ext::common
