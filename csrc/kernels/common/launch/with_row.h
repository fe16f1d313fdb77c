// How a launch finds the kernel of a row of a table of kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <iterator>
#include <type_traits>
#include <utility>

#include "kernels/config/fast_build.h"

namespace flash_attn_ext::common {

// Whether the kernel of a row is compiled. A fast build has those of small head dims alone: the host refuses other
// calls.
template <const auto& kTable, size_t kIndex>
constexpr bool is_built() {
#if FLASH_ATTN_EXT_FAST_BUILD
  constexpr auto kRow = kTable[kIndex];
  if constexpr (requires { kRow.dims; }) return std::max(kRow.dims.qk, kRow.dims.v) <= kFastBuildHeadDim;
  if constexpr (requires { kRow.head_dim; }) return kRow.head_dim <= kFastBuildHeadDim;
#endif
  return true;
}

// Calls `function` with the index of a row as a constant, so that the row can be a template argument. `kTable` is an
// array of configs; `row` is the index that a plan names.
template <const auto& kTable, class Function>
cudaError_t with_row(int row, Function&& function) {
  cudaError_t error = cudaErrorInvalidValue;
  const auto try_row = [&](auto index) {
    if constexpr (is_built<kTable, decltype(index)::value>()) {
      if (row == static_cast<int>(index())) error = function(index);
    }
  };
  const auto try_all = [&]<size_t... kIndices>(std::index_sequence<kIndices...>) {
    (try_row(std::integral_constant<size_t, kIndices>{}), ...);
  };
  try_all(std::make_index_sequence<std::size(kTable)>{});
  return error;
}

}  // namespace flash_attn_ext::common
