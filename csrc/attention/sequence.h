// Where one batch entry's rows lie. Dense batches and packed ("varlen") batches differ only here.
#pragma once

#include <cstdint>

#include "attention/host_device.h"

namespace flash_attn_ext::attention {

// One batch entry. Each work tile reads it once.
struct Sequence {
  int64_t batch;
  int64_t query_begin;  // first row in a packed tensor; 0 in a dense one
  int64_t key_begin;
  int64_t num_queries;
  int64_t num_keys;
};

struct SequenceTable {
  const int32_t* cu_seqlens_q;  // (batch + 1,) prefix sums of the query lengths, or null for a dense batch
  const int32_t* cu_seqlens_k;
  int64_t max_seqlen_q;  // dense: the length itself
  int64_t max_seqlen_k;
  int64_t total_q;  // rows of a packed tensor
  int64_t total_k;

  FLASH_HOST_DEVICE Sequence at(int64_t batch) const {
    if (cu_seqlens_q == nullptr) return {batch, 0, 0, max_seqlen_q, max_seqlen_k};
    const Rows queries = rows(cu_seqlens_q + batch, total_q, max_seqlen_q);
    const Rows keys = rows(cu_seqlens_k + batch, total_k, max_seqlen_k);
    return {batch, queries.begin, keys.begin, queries.count, keys.count};
  }

 private:
  struct Rows {
    int64_t begin;
    int64_t count;
  };

  FLASH_HOST_DEVICE static int64_t clamp(int64_t value, int64_t highest) {
    return value < 0 ? 0 : value < highest ? value : highest;
  }

  // The host does not check offsets in a GPU's memory, so they are clamped. Whatever they hold, rows stay inside the
  // tensor, and no sequence is longer than the one that grids, masks and workspaces were made for.
  FLASH_HOST_DEVICE static Rows rows(const int32_t* offsets, int64_t total, int64_t longest) {
    const int64_t begin = clamp(offsets[0], total);
    const int64_t rest = total - begin;
    return {begin, clamp(offsets[1] - begin, rest < longest ? rest : longest)};
  }
};

}  // namespace flash_attn_ext::attention
