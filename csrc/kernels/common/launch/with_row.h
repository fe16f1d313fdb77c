// How a launch finds the kernel of a row of a table of kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <iterator>
#include <type_traits>
#include <utility>

namespace flash_attn_ext::common {

// Calls `function` with the number of a row as a constant, so that the row can be a template argument. `kTable` is an
// array of configs; `row` is the number that a plan names.
template <const auto& kTable, class Function>
cudaError_t with_row(int row, Function&& function) {
  cudaError_t error = cudaErrorInvalidValue;
  const auto try_row = [&](auto number) {
    if (row == static_cast<int>(number())) error = function(number);
  };
  const auto try_all = [&]<size_t... kNumbers>(std::index_sequence<kNumbers...>) {
    (try_row(std::integral_constant<size_t, kNumbers>{}), ...);
  };
  try_all(std::make_index_sequence<std::size(kTable)>{});
  return error;
}

}  // namespace flash_attn_ext::common
