// The gradient of an ALiBi slope, passed as partial sums from the kernels that compute dS to the one that sums them.
#pragma once

#include <cstdint>

namespace flash_attn_ext::common {

// A slope's gradient is the sum of these partial sums, one per query tile: (batch, num_heads_q, per_head), accumulate
// type.
struct AlibiPartials {
  void* data = nullptr;
  int64_t per_head = 0;
};

}  // namespace flash_attn_ext::common
