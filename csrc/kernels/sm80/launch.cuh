// From the values of a plan to a kernel: compile-time tags, launches with a schedule, and the rows of a launch as a
// repair kernel gets them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <type_traits>

#include "attention/score_mod.h"
#include "kernels/common/launch/launch_blocks.cuh"
#include "kernels/common/launch/with_row.h"
#include "kernels/common/repair/repair.h"
#include "kernels/config/sm80.h"
#include "kernels/schedule/schedule.cuh"
#include "tile/element.h"

namespace flash_attn_ext::sm80 {

template <class ElementType, auto kConfigValue>
struct KernelTraits {
  using Element = ElementType;
  static constexpr auto kConfig = kConfigValue;
  static constexpr int kHeadDim = kConfig.head_dim;
  static constexpr bool kGeneric = kConfig.score == ScoreMode::kGeneric;
  static constexpr bool kHasBiasMask = kGeneric || kConfig.score == ScoreMode::kBiasMask;
};

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

template <int kValue>
using Int = std::integral_constant<int, kValue>;

template <class Function>
cudaError_t with_element(attention::ElementType element, bool tf32, Function&& function) {
  switch (element) {
    case attention::ElementType::kBFloat16:
      return function(__nv_bfloat16{});
#if !FLASH_ATTN_EXT_FAST_BUILD
    case attention::ElementType::kFloat16:
      return function(__half{});
    case attention::ElementType::kFloat32:
      return tf32 ? function(tile::Tf32{}) : function(float{});
#endif
    default:  // float64 has kernels of its own
      return cudaErrorInvalidValue;
  }
}

// Calls function(Int<head_dim>) for a head dim that the element type has kernels for (head_dim_bucket).
template <class Element, class Function>
cudaError_t with_head_dim(int head_dim, Function&& function) {
  if (head_dim == 64) return function(Int<64>{});
  if (head_dim == 128) return function(Int<128>{});
  if constexpr (sizeof(Element) == 2) {
    if (head_dim == 96) return function(Int<96>{});
  }
#if !FLASH_ATTN_EXT_FAST_BUILD
  if constexpr (!std::is_same_v<Element, tile::Tf32>) {
    if (head_dim == 256) return function(Int<256>{});
  }
  if constexpr (sizeof(Element) == 2) {
    if (head_dim == 192) return function(Int<192>{});
    if (head_dim == 512) return function(Int<512>{});
    if (head_dim == 576) return function(Int<576>{});
  }
#endif
  return cudaErrorInvalidValue;
}

// Calls function(index) with the index of a row, as a constant, if the element type and the head dim have a kernel of
// that row. TF32 has only scale-only kernels.
template <const auto& kTable, class Element, int kHeadDim>
cudaError_t with_row_of(int row, auto&& function) {
  return common::with_row<kTable>(row, [&](auto index) {
    constexpr auto kConfig = kTable[index()];
    constexpr bool kHasScore = !std::is_same_v<Element, tile::Tf32> || kConfig.score == ScoreMode::kScaleOnly;
    if constexpr (kConfig.element_bytes == sizeof(Element) && kConfig.head_dim == kHeadDim && kHasScore) {
      return function(index);
    } else {
      return cudaErrorInvalidValue;
    }
  });
}

}  // namespace flash_attn_ext::sm80
