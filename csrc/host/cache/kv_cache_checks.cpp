#include "host/cache/kv_cache_checks.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <cstdlib>
#include <cstring>

#include "attention/kv_address.h"
#include "attention/visibility.h"
#include "host/checks/checks.h"
#include "host/checks/tensor_checks.h"
#include "host/memory/memory_overlap.h"

namespace flash_attn_ext::host {
namespace {

constexpr const char* kLayout = "(batch, heads, sequence, head dim), or (batch, sequence, heads, head dim) with bshd";

void check_matrix(const char* name, const at::Tensor& tensor, const at::Tensor& q) {
  check_dense(name, tensor);
  check_dtype_and_device(name, tensor, q);
  check_rank(name, tensor, 4, kLayout);
}

void check_caches(const AttentionInputs& in) {
  check_dense("q", in.q);
  check_element_type("q", in.q, "q, the caches and the new tokens");
  check_rank("q", in.q, 4, kLayout);
  check_matrix("k_cache", in.k, in.q);
  check_matrix("v_cache", in.v, in.q);
  check_size("v_cache", "first dimension", in.v.size(0), in.k.size(0), "k_cache");
  check_size("v_cache", "number of heads", in.v.size(1), in.k.size(1), "k_cache");
  check_size("v_cache", "number of rows", in.v.size(2), in.k.size(2), "k_cache");
  check_size("k_cache", "head dim", in.k.size(3), in.q.size(3), "q");
  check_head_counts(in, "k_cache");
}

// A call with a cache is dense and has no dropout.
void check_problem(const AttentionInputs& in) {
  TORCH_CHECK(!in.cu_seqlens_q && !in.cu_seqlens_k && !in.max_seqlen_q && !in.max_seqlen_k,
              "cu_seqlens_* and max_seqlen_* do not go with a cache; pass the lengths in cache_seqlens");
  TORCH_CHECK_VALUE(in.dropout_p == 0.0 && !in.rng_seed, "dropout_p is ", in.dropout_p,
                    ", expected 0 and no rng_seed: there is no dropout with a cache");
}

// Checks for one int32 for each sequence or, with two dimensions, a row of them.
void check_integers(const char* name, const at::Tensor& tensor, const AttentionInputs& in, int64_t rank) {
  check_dense(name, tensor);
  TORCH_CHECK(tensor.scalar_type() == at::kInt, name, " has dtype ", dtype_name(tensor.scalar_type()),
              ", expected int32; cast with ", name, ".to(torch.int32)");
  check_device(name, tensor, in.q);
  TORCH_CHECK(tensor.dim() == rank && tensor.size(0) == in.batch(), name, " has shape ", tensor.sizes(), ", expected (",
              in.batch(), rank == 1 ? ",)" : ", pages)", ": a ", rank == 1 ? "number" : "row",
              " for each sequence of q");
}

void check_entries(const AttentionInputs& in, const KvCacheInputs& cache) {
  check_integers("cache_seqlens", cache.cache_seqlens, in, 1);
  TORCH_CHECK(
      !cache.block_table || !cache.cache_batch_idx,
      "block_table and cache_batch_idx were both given; a block_table already says where the keys of a sequence "
      "are: leave out cache_batch_idx");
  if (cache.cache_batch_idx) check_integers("cache_batch_idx", *cache.cache_batch_idx, in, 1);
  if (cache.block_table) {
    check_integers("block_table", *cache.block_table, in, 2);
    constexpr int64_t kMultiple = attention::KvCache::kPageMultiple;
    const int64_t page_size = in.k.size(2);
    TORCH_CHECK(page_size > 0 && page_size % kMultiple == 0, "k_cache has pages of ", page_size,
                " keys, expected a multiple of ", kMultiple,
                "; with a block_table caches are (pages, heads, page size, head dim)");
  }
  const int64_t entries = in.k.size(0);
  if (!cache.block_table && !cache.cache_batch_idx) {
    TORCH_CHECK(entries == in.batch(), "k_cache has batch size ", entries, ", expected ", in.batch(),
                " (that of q); pass cache_batch_idx for a cache with other entries, or block_table for pages");
  }
  const int64_t capacity = cache.capacity(in);
  TORCH_CHECK(entries > 0 || capacity == 0 || in.batch() == 0, "k_cache has no ",
              cache.block_table ? "pages" : "entries", ", expected 1 or more for keys to be in");
  constexpr int64_t kLongest = attention::kLongestSequence;
  TORCH_CHECK(in.q.size(2) <= kLongest && capacity <= kLongest, "q has ", in.q.size(2),
              " tokens and the cache has room for ", capacity, " in a sequence, expected at most ", kLongest,
              " (2^29); split the sequences");
  // Kernels number the tiles of scores in 32 bits.
  constexpr int64_t kFewestRows = 16, kFewestKeys = 32;  // of a GPU's tiles of scores
  const int64_t rows = in.batch() * (in.num_heads_q() * in.q.size(2) / kFewestRows + in.num_heads_k());
  const int64_t tiles = 2 * rows * (capacity / kFewestKeys + 1);
  TORCH_CHECK(tiles < int64_t{1} << 31, "q with ", in.batch(), " sequences and a cache with room for ", capacity,
              " keys in each make up to ", tiles, " tiles of scores, expected fewer than 2^31; split the batch");
}

void check_new_matrix(const char* name, const at::Tensor& tensor, const at::Tensor& cache, const AttentionInputs& in) {
  check_matrix(name, tensor, in.q);
  const int64_t head_dim = cache.size(3);
  TORCH_CHECK(tensor.size(0) == in.batch() && tensor.size(1) == in.num_heads_k() && tensor.size(3) == head_dim, name,
              " has shape ", tensor.sizes(), ", expected (", in.batch(), ", ", in.num_heads_k(), ", new tokens, ",
              head_dim, "): q's batch size, and the heads and head dim of the cache");
}

void check_written(const char* name, const at::Tensor& cache) {
  TORCH_CHECK(
      !repeats_elements(cache), name, " has shape ", cache.sizes(), " and strides ", cache.strides(),
      ": several of its rows are one (stride 0), and new keys go into each; pass a cache with memory of its own "
      "for each row, such as ",
      name, ".contiguous()");
}

void check_new(const AttentionInputs& in, const KvCacheInputs& cache) {
  TORCH_CHECK(cache.k_new.has_value() == cache.v_new.has_value(), "only ", cache.k_new ? "k_new" : "v_new",
              " was given; new tokens need both k_new and v_new");
  if (!cache.k_new) return;
  const at::Tensor& k_new = *cache.k_new;
  const at::Tensor& v_new = *cache.v_new;
  check_new_matrix("k_new", k_new, in.k, in);
  check_new_matrix("v_new", v_new, in.v, in);
  check_size("v_new", "number of tokens", v_new.size(2), k_new.size(2), "k_new");
  const int64_t num_new = cache.num_new(), capacity = cache.capacity(in);
  TORCH_CHECK(num_new >= 1, "k_new has 0 tokens for each sequence, expected 1 or more; leave out k_new and v_new");
  TORCH_CHECK(num_new <= capacity, "k_new has ", num_new, " tokens for each sequence, but the cache has room for ",
              capacity, "; allocate a longer cache");
  check_written("k_cache", in.k);
  check_written("v_cache", in.v);
  TORCH_CHECK(
      !share_memory(in.k, in.v),
      "k_cache and v_cache share memory, and new keys and values go into both; pass caches that do not overlap");
  for (const auto& [name, tensor] : {std::pair("k_new", &k_new), std::pair("v_new", &v_new)}) {
    TORCH_CHECK(!share_memory(*tensor, in.k) && !share_memory(*tensor, in.v), name,
                " shares memory with the cache that new tokens go into; pass ", name, ".clone()");
  }
}

void check_rotary(const AttentionInputs& in, const KvCacheInputs& cache) {
  TORCH_CHECK(cache.rotary_cos.has_value() == cache.rotary_sin.has_value(), "only ",
              cache.rotary_cos ? "rotary_cos" : "rotary_sin", " was given; rotation needs both");
  if (!cache.rotary_cos) {
    TORCH_CHECK_VALUE(!cache.rotary_interleaved,
                      "rotary_interleaved is True, but there are no rotary_cos and rotary_sin; pass them, or False");
    return;
  }
  const at::Tensor& cos = *cache.rotary_cos;
  TORCH_CHECK(cache.k_new.has_value(),
              "rotary_cos was given without k_new; keys are rotated when they are appended. To rotate q alone, do so "
              "before the call");
  for (const auto& [name, table] : {std::pair("rotary_cos", &cos), std::pair("rotary_sin", &*cache.rotary_sin)}) {
    check_dense(name, *table);
    check_dtype_and_device(name, *table, in.q);
    const bool matches = table->dim() == 2 && table->size(0) >= 1 && table->size(1) >= 1 &&
                         2 * table->size(1) <= in.head_dim_qk() && table->sizes() == cos.sizes();
    TORCH_CHECK(matches, name, " has shape ", table->sizes(), ", expected (positions, rotary dim / 2) of 1 or more ",
                "positions and of an even rotary dim from 2 to the head dim, ", in.head_dim_qk(),
                ", the same for rotary_cos and rotary_sin");
  }
}

void check_no_gradient(const AttentionInputs& in, const KvCacheInputs& cache) {
  if (!at::GradMode::is_enabled()) return;
  const auto check = [](const char* name, const at::Tensor& tensor) {
    TORCH_CHECK(
        !tensor.requires_grad(), name,
        " requires grad, but attention_with_kvcache has no backward pass; call it under torch.no_grad() or with ", name,
        ".detach(), or use flash_attn_ext.attention");
  };
  const auto check_if_given = [&](const char* name, const std::optional<at::Tensor>& tensor) {
    if (tensor) check(name, *tensor);
  };
  check("q", in.q);
  check("k_cache", in.k);
  check("v_cache", in.v);
  check_if_given("k_new", cache.k_new);
  check_if_given("v_new", cache.v_new);
  check_if_given("bias", in.bias);
  check_if_given("alibi_slopes", in.alibi_slopes);
  check_if_given("sink", in.sink);
  check_if_given("rotary_cos", cache.rotary_cos);
  check_if_given("rotary_sin", cache.rotary_sin);
}

bool is_check_asked_for() {
  const char* text = std::getenv("FLASH_ATTN_EXT_CHECK");
  if (text == nullptr || *text == '\0' || std::strcmp(text, "0") == 0) return false;
  TORCH_CHECK_VALUE(std::strcmp(text, "1") == 0, "FLASH_ATTN_EXT_CHECK is '", text,
                    "', expected 1 (look at the lengths, tables and indices of caches, which waits for the GPU) or 0; "
                    "unset it for 0");
  return true;
}

}  // namespace

void check_kv_cache(const AttentionInputs& in, const KvCacheInputs& cache) {
  check_in_memory(in);
  check_in_memory(cache);
  check_no_gradient(in, cache);
  check_problem(in);
  TORCH_CHECK(!in.bias_is_relative,
              "attention_with_kvcache takes no relative-position bias; pass bias with all its rows");
  check_caches(in);
  check_entries(in, cache);
  check_new(in, cache);
  check_rotary(in, cache);
  check_score_tensors(in, {in.q.size(2), cache.capacity(in)});
  check_options(in);
  if (in.q.is_cpu() || is_check_asked_for()) check_kv_cache_values(in, cache);
}

}  // namespace flash_attn_ext::host
