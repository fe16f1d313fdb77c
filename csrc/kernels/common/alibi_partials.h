// A slope's gradient on its way from the kernels that compute dS to the one that adds it up.
#pragma once

#include <cstdint>

namespace flash_attn_ext::common {

// A slope's gradient is a sum of partial sums, one per tile of queries: (batch, num_heads_q, per_head), accumulate
// type.
struct AlibiPartials {
  void* data = nullptr;
  int64_t per_head = 0;
};

}  // namespace flash_attn_ext::common
