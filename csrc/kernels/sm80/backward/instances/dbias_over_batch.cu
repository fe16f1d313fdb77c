#include "kernels/sm80/backward/dbias_over_batch.cuh"
#include "kernels/sm80/sm80_kernels.h"

namespace flash_attn_ext::sm80 {
namespace {

// Whether two neighbouring keys of dBias lie in one aligned word.
bool has_aligned_pairs(const attention::BackwardParams& p) {
  const attention::BiasGradient& g = p.dbias;
  return g.key_stride == 1 && (g.head_stride | g.query_stride | p.sequences.max_seqlen_k) % 2 == 0 &&
         reinterpret_cast<uintptr_t>(g.data) % 4 == 0;
}

}  // namespace

cudaError_t run_dbias_over_batch(const BackwardParams& p, const BackwardPlan& plan, cudaStream_t stream) {
  const int64_t query_tiles = dbias_tiles(p.sequences.max_seqlen_q);
  const int64_t key_tiles = dbias_tiles(p.sequences.max_seqlen_k);
  const int64_t tiles = (p.dbias.per_head ? p.num_heads_q : 1) * query_tiles * key_tiles;
  const auto divisor = [](int64_t n) { return attention::Divisor::of(static_cast<uint32_t>(n)); };
  DbiasOverBatchParams params = {.p = p,
                                 .partials = p.dbias_partials,
                                 .num_splits = static_cast<int>(plan.dbias_splits),
                                 .entries = static_cast<int>(p.batch * (p.dbias.per_head ? 1 : p.num_heads_q)),
                                 .scale = static_cast<float>(p.score_mod.scale),
                                 .group = divisor(p.queries_per_key_head()),
                                 .tiles = divisor(tiles),
                                 .key_tiles = divisor(key_tiles),
                                 .query_tiles = divisor(query_tiles),
                                 .in_pairs = has_aligned_pairs(p)};
  return with_element(p.element, /*tf32=*/false, [&](auto element) {
    using Element = decltype(element);
    if constexpr (sizeof(Element) == 2) {
      const auto run = [&](auto head_dim) {
        return p.dropout.enabled() ? dbias_over_batch<Element, head_dim(), true>(params, stream)
                                   : dbias_over_batch<Element, head_dim(), false>(params, stream);
      };
      return plan.dscore_head_dim == 32 ? run(std::integral_constant<int, 32>())
                                        : run(std::integral_constant<int, 64>());
    }
    return cudaErrorInvalidValue;
  });
}

}  // namespace flash_attn_ext::sm80
