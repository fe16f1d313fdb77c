#include <algorithm>

#include "kernels/dispatch.h"
#include "kernels/sm80/launch.cuh"
#include "kernels/sm80/sm80_kernels.h"

namespace flash_attn_ext::sm80 {

int64_t num_alibi_partials(const attention::AttentionParams& p) {
  int64_t tiles = 0;
  with_head_dim(std::max(p.head_dim_qk, p.head_dim_v), [&](auto head_dim) {
    tiles = num_tiles(p.sequences.max_seqlen_q, backward_dq_tile(head_dim()).queries);
    return cudaSuccess;
  });
  return tiles;
}

}  // namespace flash_attn_ext::sm80
