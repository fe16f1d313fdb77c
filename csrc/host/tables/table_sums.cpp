#include "host/tables/table_sums.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <vector>

#include "host/checks/tensor_checks.h"
#include "host/library/library.h"
#include "host/make_params.h"

namespace flash_attn_ext::host {
namespace {

// Each row is added from its first column to its last. Entries that the table lacks are clamped, as on a GPU.
template <class Real>
void add_on_cpu(const at::Tensor& values, const at::Tensor& entries, const at::Tensor& sums) {
  const auto from = values.accessor<const Real, 2>();
  const auto entry = entries.accessor<const int32_t, 1>();
  auto to = sums.accessor<Real, 2>();
  if (sums.size(1) == 0) return;
  const int64_t last_entry = sums.size(1) - 1;
  at::parallel_for(0, values.size(0), 1, [&](int64_t begin, int64_t end) {
    std::vector<double> row(sums.size(1));
    for (int64_t i = begin; i < end; ++i) {
      std::fill(row.begin(), row.end(), 0.0);
      for (int64_t column = 0; column < values.size(1); ++column) {
        const int64_t e = std::clamp<int64_t>(entry[column], 0, last_entry);
        row[e] += static_cast<double>(from[i][column]);
      }
      for (int64_t e = 0; e < sums.size(1); ++e) to[i][e] = static_cast<Real>(row[e]);
    }
  });
}

void check_entries(const at::Tensor& entries, const at::Tensor& of) {
  check_holds_memory("entries", entries);
  TORCH_CHECK(entries.scalar_type() == at::kInt && entries.dim() == 1 && entries.is_contiguous() &&
                  entries.device() == of.device(),
              "entries has dtype ", dtype_name(entries.scalar_type()), " and shape ", entries.sizes(),
              ", expected contiguous int32 of shape (columns,) on ", of.device());
}

}  // namespace

at::ScalarType accumulate_type(const at::Tensor& values) {
  return values.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

at::Tensor look_up(const at::Tensor& table, const at::Tensor& entries) {
  check_holds_memory("table", table);
  check_rank("table", table, 2, "(rows, entries)");
  check_entries(entries, table);
  if (table.is_cpu()) return at::index_select(table, 1, entries);
  check_element_type("table", table, "the table");
  TORCH_CHECK(table.size(1) > 0, "table has shape ", table.sizes(), ", expected at least one entry");
  const c10::DeviceGuard guard(table.device());
  const at::Tensor to = at::empty({table.size(0), entries.size(0)}, table.options());
  const common::TableLookUp params = {.table = table.const_data_ptr(),
                                      .element_bytes = table.element_size(),
                                      .rows = table.size(0),
                                      .num_entries = table.size(1),
                                      .row_stride = table.stride(0),
                                      .entry_stride = table.stride(1),
                                      .entries = entries.const_data_ptr<int32_t>(),
                                      .columns = entries.size(0),
                                      .to = to.mutable_data_ptr()};
  launch(table.device(), [&](void* stream) { return kernels().gpu.look_up(params, stream); });
  return to;
}

at::Tensor table_sums(const at::Tensor& values, const at::Tensor& entries, int64_t num_entries, at::ScalarType dtype) {
  check_holds_memory("values", values);
  check_rank("values", values, 2, "(rows, columns)");
  check_element_type("values", values, "the values");
  check_entries(entries, values);
  check_size("entries", "number of columns", entries.size(0), values.size(1), "values");
  TORCH_CHECK(num_entries >= 0, "num_entries is ", num_entries, ", expected 0 or more");
  const at::ScalarType accumulate = accumulate_type(values);
  if (values.is_cpu()) {
    const at::Tensor sums = at::empty({values.size(0), num_entries}, values.options().dtype(accumulate));
    accumulate == at::kDouble ? add_on_cpu<double>(values, entries, sums)
                              : add_on_cpu<float>(values.to(at::kFloat), entries, sums);
    return sums.to(dtype);
  }
  const at::Tensor rows = values.stride(1) == 1 ? values : values.contiguous();
  const c10::DeviceGuard guard(values.device());
  const at::Tensor sums = at::empty({values.size(0), num_entries}, values.options().dtype(dtype));
  common::TableSums params = {.values = rows.const_data_ptr(),
                              .element = element_type(rows.scalar_type()),
                              .rows = rows.size(0),
                              .columns = rows.size(1),
                              .row_stride = rows.stride(0),
                              .entries = entries.const_data_ptr<int32_t>(),
                              .num_entries = num_entries,
                              .sums = sums.mutable_data_ptr(),
                              .sums_element = element_type(dtype)};
  const at::Tensor partial_sums =
      at::empty({params.num_splits(), rows.size(0), num_entries}, values.options().dtype(accumulate));
  params.partial_sums = partial_sums.mutable_data_ptr();
  launch(values.device(), [&](void* stream) { return kernels().gpu.table_sums(params, stream); });
  return sums;
}

}  // namespace flash_attn_ext::host
