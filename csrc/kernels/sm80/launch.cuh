// Launches a kernel with a schedule, and says whose rows its warps are.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <type_traits>

#include "kernels/common/launch_blocks.cuh"
#include "kernels/common/repair.h"
#include "kernels/schedule/schedule.cuh"
#include "kernels/tile_config.h"
#include "tile/element.h"

namespace flash_attn_ext::sm80 {

template <class Kernel, class Params>
cudaError_t launch(void (*kernel)(Params), const Params& params, int64_t num_blocks, cudaStream_t stream) {
  static_assert(sizeof(typename Kernel::Shared) <= kSharedBytes);
  return common::launch_blocks<Kernel>(kernel, num_blocks, stream, params);
}

template <class Kernel, class Params>
cudaError_t launch(void (*kernel)(Params, Schedule), const Params& params, const Schedule& schedule,
                   cudaStream_t stream) {
  static_assert(sizeof(typename Kernel::Shared) <= kSharedBytes);
  return common::launch_blocks<Kernel>(kernel, {schedule.num_blocks, schedule.parts}, stream, params, schedule);
}

// What a repair kernel is told about a launch of Kernel.
template <class Kernel>
common::FlaggedRows flagged_rows(const uint8_t* flags, const Schedule& schedule) {
  return {.flags = flags,
          .schedule = schedule,
          .warps = Kernel::kTile.warps,
          .rows_per_warp = Kernel::kRowsPerWarp,
          .columns = Kernel::kTile.columns};
}

// What a type is in memory.
template <class Element>
using InMemory = std::conditional_t<std::is_same_v<Element, tile::Tf32>, float, Element>;

}  // namespace flash_attn_ext::sm80
