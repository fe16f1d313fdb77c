// Lists the work tiles of a packed batch that exist, before the kernel that fetches them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "attention/sequence.h"
#include "kernels/schedule/existing_tiles.h"
#include "kernels/schedule/loop_order.h"
#include "kernels/schedule/schedule.cuh"

namespace flash_attn_ext::sm90 {

// The query tiles of a forward pass. memory: ExistingTiles::bytes(schedule.num_blocks, entries).
cudaError_t list_existing_query_tiles(ExistingTiles& tiles, const attention::SequenceTable& sequences,
                                      const Schedule& schedule, int tile_rows, void* memory, cudaStream_t stream);

// The key tiles of the key-stationary backward pass. memory: ExistingTiles::bytes(order.num_work_tiles(), entries).
cudaError_t list_existing_key_tiles(ExistingTiles& tiles, const attention::SequenceTable& sequences,
                                    const LoopOrder& order, int64_t num_heads_k, void* memory, cudaStream_t stream);

}  // namespace flash_attn_ext::sm90
