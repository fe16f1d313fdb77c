// What both sides of the library's boundary know of plans: the resources that a plan may use, and sizes that both
// count.
#pragma once

#include <cstdint>

#include "attention/params.h"

namespace flash_attn_ext::plan {

// The resources that a plan may use.
struct Limits {
  int64_t max_materialised_bytes = 0;  // for materialised scores and masks (FLASH_ATTN_EXT_WORKSPACE_MIB)
  int64_t l2_bytes = 0;
  int64_t sms = 0;
};

// The bytes of a value of the accumulate type for each query of each query head, laid out as the LSE.
inline int64_t statistic_bytes(const attention::AttentionParams& p) {
  const int64_t rows = p.sequences.cu_seqlens_q != nullptr ? p.sequences.total_q : p.batch * p.sequences.max_seqlen_q;
  return rows * p.num_heads_q * (p.element == attention::ElementType::kFloat64 ? 8 : 4);
}

inline int64_t max_head_dim_sm80(attention::ElementType element) { return attention::is_16_bit(element) ? 576 : 256; }

// Forward mode has a kernel for some calls. The others are PyTorch operations, tile by tile.
struct TangentPlan {
  bool has_kernel = false;
  int head_dim = 0;  // that the kernel is compiled for
  int64_t l2_bytes = 0;
};

}  // namespace flash_attn_ext::plan
