// Launches a kernel with a schedule, and describes its rows for a repair kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <type_traits>

#include "kernels/common/launch/launch_blocks.cuh"
#include "kernels/common/repair/repair.h"
#include "kernels/config/sm80.h"
#include "kernels/schedule/schedule.cuh"
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
  return common::launch_blocks<Kernel>(kernel, {schedule.num_blocks, schedule.splits}, stream, params, schedule);
}

// The rows of a launch of Kernel whose warps set flags, for a repair kernel.
template <class Kernel>
common::FlaggedRows flagged_rows(const uint8_t* flags, const Schedule& schedule) {
  return {.flags = flags,
          .schedule = schedule,
          .warps = Kernel::kTile.warps,
          .rows_per_warp = Kernel::kRowsPerWarp,
          .columns = Kernel::kTile.columns};
}

// The type that an element has in memory.
template <class Element>
using InMemory = std::conditional_t<std::is_same_v<Element, tile::Tf32>, float, Element>;

}  // namespace flash_attn_ext::sm80
