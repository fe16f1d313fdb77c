#include <algorithm>

#include "kernels/dispatch.h"
#include "kernels/sm80/sm80_kernels.h"

namespace flash_attn_ext::sm80 {
namespace {

template <int kElementBytes>
int64_t num_query_tiles(const attention::AttentionParams& p) {
  int64_t tiles = 0;
  with_head_dim<kElementBytes>(std::max(p.head_dim_qk, p.head_dim_v), [&](auto head_dim) {
    tiles =
        num_tiles(p.sequences.max_seqlen_q, backward_dq_tile(kElementBytes, head_dim(), Variant::kExtended).queries);
    return cudaSuccess;
  });
  return tiles;
}

}  // namespace

int64_t num_alibi_partials(const attention::AttentionParams& p) {
  if (p.element == attention::ElementType::kFloat64) return p.sequences.max_seqlen_q;
  return p.element == attention::ElementType::kFloat32 ? num_query_tiles<4>(p) : num_query_tiles<2>(p);
}

}  // namespace flash_attn_ext::sm80
