#include "host/cache/kv_cache.h"

#include <c10/core/DeviceGuard.h>

#include "attention/append.h"
#include "host/cache/kv_cache_checks.h"
#include "host/checks/tensor_checks.h"
#include "host/forward.h"
#include "host/make_params.h"
#include "host/memory/readable.h"

namespace flash_attn_ext::host {
namespace {

// The arrays as kernels read them: the given tensors, or copies. Absent ones are undefined.
struct CacheArrays {
  at::Tensor seqlens, block_table, batch_index;
};

CacheArrays readable_arrays(const KvCacheInputs& cache) {
  CacheArrays arrays;
  arrays.seqlens = readable_array("cache_seqlens", cache.cache_seqlens);
  if (cache.block_table) arrays.block_table = readable_table("block_table", *cache.block_table);
  if (cache.cache_batch_idx) arrays.batch_index = readable_array("cache_batch_idx", *cache.cache_batch_idx);
  return arrays;
}

const int32_t* integers(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr<int32_t>() : nullptr;
}

attention::KvCache describe_cache(const AttentionInputs& in, const KvCacheInputs& cache, const CacheArrays& arrays) {
  return {.seqlens = integers(arrays.seqlens),
          .batch_index = integers(arrays.batch_index),
          .block_table = integers(arrays.block_table),
          .table_stride = cache.block_table ? arrays.block_table.stride(0) : 0,
          .num_entries = in.k.size(0),
          .page_size =
              cache.block_table ? attention::Divisor::of(static_cast<uint32_t>(in.k.size(2))) : attention::Divisor{},
          .num_new = cache.num_new()};
}

attention::Rotary describe_rotary(const AttentionInputs& in, const KvCacheInputs& cache, const at::Tensor& cos,
                                  const at::Tensor& sin) {
  return {.cos = cos.const_data_ptr(),
          .sin = sin.const_data_ptr(),
          .cos_stride = cos.stride(0),
          .sin_stride = sin.stride(0),
          .num_positions = cos.size(0),
          .dim = 2 * cos.size(1),
          .interleaved = cache.rotary_interleaved,
          .queries_advance = queries_advance(in)};
}

attention::AppendParams append_params(const attention::AttentionParams& params) {
  attention::AppendParams append;
  append.element = params.element;
  append.batch = params.batch;
  append.num_heads_q = params.num_heads_q;
  append.num_heads_k = params.num_heads_k;
  append.head_dim_qk = params.head_dim_qk;
  append.head_dim_v = params.head_dim_v;
  append.num_queries = params.sequences.max_seqlen_q;
  append.capacity = params.sequences.max_seqlen_k;
  append.cache = params.cache;
  append.k = params.k;
  append.v = params.v;
  append.q = params.q;
  return append;
}

// Gives a cache that is a lazy clone memory of its own. This comes before the cache is written, and before any check of
// which memory it shares.
void take_own_memory(const at::Tensor& cache) {
  if (holds_memory(cache)) cache.mutable_data_ptr();
}

// Counts a write to a cache, so that autograd notices it if it has saved that cache. Inference tensors have no version.
void count_as_written(const at::Tensor& cache) {
  if (!cache.is_inference()) cache.unsafeGetTensorImpl()->bump_version();
}

// Keeps the tensors that an append needs alive while kernels read them. Absent ones are undefined.
struct NewKeys {
  at::Tensor k, v, cos, sin, q_rotated;
};

// If keys are rotated, so is q, and `params` gets the rotated one.
NewKeys describe_new(const Backend& backend, const AttentionInputs& in, const KvCacheInputs& cache,
                     attention::AppendingForwardParams& params) {
  NewKeys keys;
  keys.k = readable_matrix(backend, "k_new", *cache.k_new);
  keys.v = readable_matrix(backend, "v_new", *cache.v_new);
  attention::AppendParams& append = params.append = append_params(params);
  append.k_new = matrix_view(keys.k);
  append.v_new = matrix_view(keys.v);
  if (cache.rotary_cos) {
    keys.cos = readable_table("rotary_cos", *cache.rotary_cos);
    keys.sin = readable_table("rotary_sin", *cache.rotary_sin);
    append.rotary = describe_rotary(in, cache, keys.cos, keys.sin);
    keys.q_rotated = empty_with_aligned_rows(in.q);
    params.q = append.q_rotated = written_matrix_view(keys.q_rotated);
  }
  return keys;
}

}  // namespace

ForwardOutputs attention_with_kvcache(const AttentionInputs& in, const KvCacheInputs& cache, bool wants_lse) {
  if (cache.k_new) {
    take_own_memory(in.k);
    take_own_memory(in.v);
  }
  check_kv_cache(in, cache);
  const c10::OptionalDeviceGuard guard(in.q.device());
  const CacheArrays arrays = readable_arrays(cache);
  attention::AppendingForwardParams params;
  static_cast<attention::AttentionParams&>(params) = make_attention_params(in);
  params.cache = describe_cache(in, cache, arrays);
  params.sequences.max_seqlen_k = params.sequences.total_k = cache.capacity(in);
  const Backend& backend = choose_backend(in, params);
  const InputCopies copies = make_readable_except_keys(backend, in, params);
  const bool has_new = cache.k_new && in.batch() > 0 && in.num_heads_k() > 0;
  const NewKeys new_keys = has_new ? describe_new(backend, in, cache, params) : NewKeys();
  if (has_new && !(backend.readable(in.k) && backend.readable(in.v))) {
    // The caller's own memory gets the new keys; the copies that kernels read are made afterwards.
    backend.append(params.append, in.q.device());
    params.append = {};
  }
  const at::Tensor keys = readable_matrix(backend, "k_cache", in.k), values = readable_matrix(backend, "v_cache", in.v);
  params.k = matrix_view(keys);
  params.v = matrix_view(values);
  const ForwardOutputs outputs = allocate_outputs(in, wants_lse);
  run_forward(backend, params, outputs);
  if (has_new) {
    count_as_written(in.k);
    count_as_written(in.v);
  }
  return outputs;
}

}  // namespace flash_attn_ext::host
