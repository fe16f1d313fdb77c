// Checks the values of a cache's lengths, tables and indices.
#include <c10/util/Exception.h>

#include <algorithm>
#include <unordered_map>

#include "host/cache/kv_cache_checks.h"

namespace flash_attn_ext::host {
namespace {

// Maps an entry or a page to the sequence that appends to it.
using Writers = std::unordered_map<int32_t, int64_t>;

at::Tensor in_cpu_memory(const at::Tensor& tensor) { return tensor.is_cpu() ? tensor : tensor.cpu(); }

using Lengths = at::TensorAccessor<const int32_t, 1>;

void check_lengths(const Lengths& seqlens, const AttentionInputs& in, const KvCacheInputs& cache) {
  const int64_t capacity = cache.capacity(in), num_new = cache.num_new();
  for (int64_t b = 0; b < seqlens.size(0); ++b) {
    TORCH_CHECK(seqlens[b] >= 0 && seqlens[b] <= capacity - num_new, "cache_seqlens[", b, "] is ", seqlens[b],
                ", expected 0 to ", capacity - num_new, ": the cache has room for ", capacity,
                " keys of a sequence, and k_new has ", num_new,
                "; cache_seqlens counts the keys from before this call. Allocate a longer cache, or drop old keys");
  }
}

void check_positions(const Lengths& seqlens, const AttentionInputs& in, const KvCacheInputs& cache) {
  if (!cache.rotary_cos) return;
  const int64_t num_positions = cache.rotary_cos->size(0);
  const int64_t num_rotated = std::max(cache.num_new(), queries_advance(in) ? in.q.size(2) : 1);
  for (int64_t b = 0; b < seqlens.size(0); ++b) {
    TORCH_CHECK(seqlens[b] + num_rotated <= num_positions, "rotary_cos has ", num_positions,
                " positions, but sequence ", b, " needs ", seqlens[b] + num_rotated, " (cache_seqlens[", b, "] is ",
                seqlens[b], ", and k_new or q has ", num_rotated, " tokens); make longer rotary_cos and rotary_sin");
  }
}

void check_batch_index(const at::Tensor& index, const AttentionInputs& in, const KvCacheInputs& cache) {
  const auto entries = index.accessor<const int32_t, 1>();
  Writers writers;
  for (int64_t b = 0; b < entries.size(0); ++b) {
    TORCH_CHECK(entries[b] >= 0 && entries[b] < in.k.size(0), "cache_batch_idx[", b, "] is ", entries[b],
                ", expected 0 to ", in.k.size(0) - 1, ": the cache has ", in.k.size(0), " entries");
    if (cache.num_new() == 0) continue;
    const auto [writer, is_only_one] = writers.emplace(entries[b], b);
    TORCH_CHECK(is_only_one, "cache_batch_idx[", writer->second, "] and cache_batch_idx[", b, "] are both ", entries[b],
                ", and both sequences would append to that entry; give each an entry of its own");
  }
}

// The pages that hold a sequence's keys after the append, which writes to those from first_new on.
struct Pages {
  int64_t first_new;
  int64_t count;
};

Pages pages_of(int64_t seqlen, int64_t num_new, int64_t page_size) {
  const int64_t count = (seqlen + num_new + page_size - 1) / page_size;
  return {num_new > 0 ? seqlen / page_size : count, count};
}

void check_block_table(const at::Tensor& block_table, const Lengths& seqlens, const AttentionInputs& in,
                       const KvCacheInputs& cache) {
  const auto table = block_table.accessor<const int32_t, 2>();
  const auto pages = [&](int64_t b) { return pages_of(seqlens[b], cache.num_new(), in.k.size(2)); };
  Writers writers;
  for (int64_t b = 0; b < table.size(0); ++b) {
    for (int64_t i = 0; i < pages(b).count; ++i) {
      TORCH_CHECK(table[b][i] >= 0 && table[b][i] < in.k.size(0), "block_table[", b, "][", i, "] is ", table[b][i],
                  ", expected 0 to ", in.k.size(0) - 1, ": the cache has ", in.k.size(0), " pages, and sequence ", b,
                  " uses the first ", pages(b).count, " of its row");
      if (i < pages(b).first_new) continue;
      const auto [writer, is_only_one] = writers.emplace(table[b][i], b);
      TORCH_CHECK(is_only_one, "sequences ", writer->second, " and ", b, " of block_table both append to page ",
                  table[b][i], "; give each a page of its own for new tokens");
    }
  }
  for (int64_t b = 0; b < table.size(0); ++b) {
    for (int64_t i = 0; i < pages(b).first_new; ++i) {
      const auto writer = writers.find(table[b][i]);
      TORCH_CHECK(writer == writers.end(), "sequence ", writer->second, " of block_table appends to page ", table[b][i],
                  ", in which sequence ", b, " has keys; give it a page of its own for new tokens");
    }
  }
}

}  // namespace

void check_kv_cache_values(const AttentionInputs& in, const KvCacheInputs& cache) {
  const at::Tensor seqlens = in_cpu_memory(cache.cache_seqlens);
  const auto lengths = seqlens.accessor<const int32_t, 1>();
  check_lengths(lengths, in, cache);
  check_positions(lengths, in, cache);
  if (cache.cache_batch_idx) check_batch_index(in_cpu_memory(*cache.cache_batch_idx), in, cache);
  if (cache.block_table) check_block_table(in_cpu_memory(*cache.block_table), lengths, in, cache);
}

}  // namespace flash_attn_ext::host
