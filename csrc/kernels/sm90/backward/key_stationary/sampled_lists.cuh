// Whether a mask makes key tiles wait for each other, so that L2 head groups are larger. A sample of the lists of
// iterations tells, and the most contributors of a query tile. All CTAs get the same answer.
#pragma once

#include <cstdint>

#include "kernels/sm90/backward/key_stationary/arguments.h"

namespace flash_attn_ext::sm90 {

struct SampledLists {
  const KeyStationaryArguments& args;

  // The order of work tiles. All threads of the CTA must call this.
  __device__ __forceinline__ LoopOrder order() const {
    return args.order.waiting_group_pairs > 0 && key_tiles_wait() ? args.order.with_larger_groups() : args.order;
  }

 private:
  static constexpr int kSamples = 512;

  // Key tiles of lists of blocks wait where the lists are sparse, those of other masks where a query tile has a long
  // queue.
  __device__ __forceinline__ bool key_tiles_wait() const {
    __shared__ uint32_t iterations;
    __shared__ uint32_t visible;
    const bool has_blocks = args.params.score_mod.blocks.present();
    if (threadIdx.x == 0) iterations = visible = 0;
    __syncthreads();
    const auto lists = static_cast<uint32_t>(args.mask.num_lists());
    const uint32_t samples = min(lists, static_cast<uint32_t>(kSamples));
    uint32_t own_iterations = 0;
    uint32_t own_visible = 0;
    for (uint32_t i = threadIdx.x; i < samples; i += blockDim.x) {
      // Spread by a prime: evenly spaced lists would be those of a few key tiles only.
      const auto list = static_cast<uint32_t>(uint64_t{i} * 2654435761u % lists);
      own_iterations += static_cast<uint32_t>(args.mask.counts[list]);
      if (has_blocks) own_visible += visible_iterations(list);
    }
    atomicAdd(&iterations, own_iterations);
    atomicAdd(&visible, own_visible);
    __syncthreads();
    if (has_blocks) return LoopOrder::is_sparse(iterations, visible);
    const LoopOrder::Head head = {.iterations = int64_t{iterations} * args.mask.key_tiles / samples,
                                  .query_tiles = args.mask.query_tiles,
                                  .most_contributors = *args.mask.most_contributors};
    const int64_t heads = args.params.queries_per_key_head() / args.order.kv_group_shares;
    return LoopOrder::has_long_queue(head, heads, args.mask.ctas);
  }

  // How many iterations a list's key tile has without the mask.
  __device__ __forceinline__ uint32_t visible_iterations(uint32_t list) const {
    const auto plane = list / static_cast<uint32_t>(args.mask.key_tiles);
    const auto tile = static_cast<int>(list - plane * static_cast<uint32_t>(args.mask.key_tiles));
    const int batch = static_cast<int>(plane) / (args.mask.directions * args.mask.mask_heads);
    const attention::Sequence sequence = args.params.sequences.at(batch);
    if (tile >= LoopOrder::num_tiles(sequence.num_keys, LoopOrder::kKeys) || sequence.num_queries == 0) return 0;
    const LoopOrder::Tiles seen_by = LoopOrder::visible_query_tiles(args.params.visibility, sequence, tile);
    return seen_by.empty() ? 0 : static_cast<uint32_t>(seen_by.end - seen_by.begin);
  }
};

}  // namespace flash_attn_ext::sm90
