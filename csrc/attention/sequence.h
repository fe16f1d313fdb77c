// Where one batch entry's rows lie. Dense batches and packed ("varlen") batches differ only here.
#pragma once

#include <cstdint>

#include "attention/host_device.h"

namespace flash_attn_ext::attention {

// One batch entry, read once per work item.
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

  FLASH_HOST_DEVICE Sequence at(int64_t batch) const {
    if (cu_seqlens_q == nullptr) return {batch, 0, 0, max_seqlen_q, max_seqlen_k};
    const int64_t query_begin = cu_seqlens_q[batch];
    const int64_t key_begin = cu_seqlens_k[batch];
    return {batch, query_begin, key_begin, cu_seqlens_q[batch + 1] - query_begin, cu_seqlens_k[batch + 1] - key_begin};
  }
};

}  // namespace flash_attn_ext::attention
