#include "host/table_sums.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <vector>

#include "host/library.h"
#include "host/make_params.h"
#include "host/tensor_checks.h"

namespace flash_attn_ext::host {
namespace {

// Each row is added from its first column to its last.
template <class Real>
void add_on_cpu(const at::Tensor& values, const at::Tensor& entries, const at::Tensor& sums) {
  const auto from = values.accessor<const Real, 2>();
  const auto entry = entries.accessor<const int32_t, 1>();
  auto to = sums.accessor<Real, 2>();
  at::parallel_for(0, values.size(0), 1, [&](int64_t begin, int64_t end) {
    std::vector<double> row(sums.size(1));
    for (int64_t i = begin; i < end; ++i) {
      std::fill(row.begin(), row.end(), 0.0);
      for (int64_t column = 0; column < values.size(1); ++column) {
        const int64_t e = entry[column];
        if (e >= 0 && e < sums.size(1)) row[e] += static_cast<double>(from[i][column]);
      }
      for (int64_t e = 0; e < sums.size(1); ++e) to[i][e] = static_cast<Real>(row[e]);
    }
  });
}

}  // namespace

at::Tensor table_sums(const at::Tensor& values, const at::Tensor& entries, int64_t num_entries) {
  check_holds_memory("values", values);
  check_holds_memory("entries", entries);
  check_rank("values", values, 2, "(rows, columns)");
  check_rank("entries", entries, 1, "(columns,)");
  TORCH_CHECK(entries.scalar_type() == at::kInt && entries.size(0) == values.size(1) && entries.is_contiguous() &&
                  entries.device() == values.device(),
              "entries has dtype ", dtype_name(entries.scalar_type()), " and shape ", entries.sizes(),
              ", expected contiguous int32 of shape (", values.size(1), ",) on ", values.device());
  TORCH_CHECK(num_entries >= 0, "num_entries is ", num_entries, ", expected 0 or more");
  check_element_type("values", values, "the values");
  const bool in_float64 = values.scalar_type() == at::kDouble;
  const at::TensorOptions options = values.options().dtype(in_float64 ? at::kDouble : at::kFloat);
  const at::Tensor sums = at::empty({values.size(0), num_entries}, options);
  if (values.is_cpu()) {
    in_float64 ? add_on_cpu<double>(values, entries, sums) : add_on_cpu<float>(values.to(at::kFloat), entries, sums);
    return sums;
  }
  const at::Tensor rows = values.stride(1) == 1 ? values : values.contiguous();
  const c10::DeviceGuard guard(values.device());
  common::TableSums params = {.values = rows.const_data_ptr(),
                              .element = element_type(rows.scalar_type()),
                              .rows = rows.size(0),
                              .columns = rows.size(1),
                              .row_stride = rows.stride(0),
                              .entries = entries.const_data_ptr<int32_t>(),
                              .num_entries = num_entries,
                              .sums = sums.mutable_data_ptr()};
  const at::Tensor parts = at::empty({params.num_parts(), rows.size(0), num_entries}, options);
  params.parts = parts.mutable_data_ptr();
  check_launch(kernels().gpu.table_sums(params, current_stream(values.device())));
  return sums;
}

}  // namespace flash_attn_ext::host
