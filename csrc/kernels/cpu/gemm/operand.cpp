#include "kernels/cpu/gemm/operand.h"

#include <algorithm>
#include <type_traits>

#include "kernels/cpu/gemm/tile_gemm.h"
#include "kernels/cpu/rows/row_ops.h"
#include "kernels/cpu/schedule/work_queue.h"

namespace flash_attn_ext::cpu {
namespace {

using attention::ElementType;

template <class Real>
constexpr ElementType kElementOf = std::is_same_v<Real, double> ? ElementType::kFloat64 : ElementType::kFloat32;

template <class Element, class Real>
void convert(Real* out, const Element* elements, int64_t n) {
  if constexpr (sizeof(Element) == 2 && std::is_same_v<Real, float>) {
    convert_row(out, elements, n);
  } else {
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<Real>(elements[i]);
  }
}

template <class Element, class Real>
void store(Element* out, int64_t stride, const Real* values, int64_t n, Real factor) {
  if constexpr (std::is_same_v<Element, Real> || (sizeof(Element) == 2 && std::is_same_v<Real, float>)) {
    if (stride == 1) return store_row(out, values, n, factor);
  }
  for (int64_t j = 0; j < n; ++j) out[j * stride] = static_cast<Element>(factor * values[j]);
}

template <class Real>
void store_scaled(const Operand& operand, const RowRange& rows, Block<const Real> values, Block<const Real> factors) {
  with_element(operand.element, [&](auto* type) {
    using Element = std::remove_pointer_t<decltype(type)>;
    for (int64_t i = 0; i < rows.count; ++i) {
      Element* target = operand.view.row<Element>(rows.batch, rows.head, rows.begin + i);
      store(target, operand.view.column_stride, values.row(i), operand.columns, *factors.row(i));
    }
  });
}

constexpr int64_t kConvertedRows = 16;  // converted at a time before they are transposed, so that they stay in L1

}  // namespace

template <class Real>
bool Operand::readable_in_place() const {
  return element == kElementOf<Real> && (view.column_stride == 1 || columns == 1) && view.row_stride >= columns &&
         view.row_stride <= kLargestStride;
}

template <class Real>
void convert_rows(const Operand& operand, const RowRange& rows, Real* out) {
  const int64_t columns = operand.columns;
  with_element(operand.element, [&](auto* type) {
    using Element = std::remove_pointer_t<decltype(type)>;
    for (int64_t i = 0; i < rows.count; ++i) {
      const Element* source = operand.view.row<const Element>(rows.batch, rows.head, rows.begin + i);
      Real* target = out + i * columns;
      const int64_t stride = operand.view.column_stride;
      if (stride == 1) {
        convert(target, source, columns);
      } else {
        for (int64_t j = 0; j < columns; ++j) target[j] = static_cast<Real>(source[j * stride]);
      }
    }
  });
}

template <class Real>
Block<const Real> load_rows(const Operand& operand, const RowRange& rows, Real* scratch) {
  if (operand.readable_in_place<Real>()) {
    return {operand.view.row<const Real>(rows.batch, rows.head, rows.begin), operand.view.row_stride};
  }
  convert_rows(operand, rows, scratch);
  return {scratch, operand.columns};
}

template <class Real>
bool all_finite(Block<const Real> block, int64_t rows, int64_t columns) {
  if (block.stride == columns) return all_finite(block.data, rows * columns);
  for (int64_t i = 0; i < rows; ++i) {
    if (!all_finite(block.row(i), columns)) return false;
  }
  return true;
}

template <class Real>
void load_transposed(const Operand& operand, const RowRange& rows, int64_t width, Block<Real> out) {
  Scratch<Real> converted(operand.readable_in_place<Real>() ? 0 : kConvertedRows * operand.columns);
  for (int64_t row = 0; row < rows.count; row += kConvertedRows) {
    const RowRange range = {rows.batch, rows.head, rows.begin + row, std::min(kConvertedRows, rows.count - row)};
    transpose(range.count, operand.columns, load_rows<Real>(operand, range, converted.data()),
              {out.data + row, out.stride});
  }
  for (int64_t j = 0; j < operand.columns; ++j) {
    std::fill(out.row(j) + rows.count, out.row(j) + width, Real(0));
  }
}

template <class Real>
void store_rows(const Operand& operand, const RowRange& rows, Block<const Real> values, const Real* factors) {
  store_scaled<Real>(operand, rows, values, {factors, 1});
}

template <class Real>
void store_rows(const Operand& operand, const RowRange& rows, Block<const Real> values, Real factor) {
  store_scaled<Real>(operand, rows, values, {&factor, 0});
}

#define FLASH_INSTANTIATE(Real)                                                                    \
  template bool all_finite<Real>(Block<const Real>, int64_t, int64_t);                             \
  template bool Operand::readable_in_place<Real>() const;                                          \
  template void convert_rows<Real>(const Operand&, const RowRange&, Real*);                        \
  template Block<const Real> load_rows<Real>(const Operand&, const RowRange&, Real*);              \
  template void load_transposed<Real>(const Operand&, const RowRange&, int64_t, Block<Real>);      \
  template void store_rows<Real>(const Operand&, const RowRange&, Block<const Real>, const Real*); \
  template void store_rows<Real>(const Operand&, const RowRange&, Block<const Real>, Real);
FLASH_INSTANTIATE(float)
FLASH_INSTANTIATE(double)
#undef FLASH_INSTANTIATE

}  // namespace flash_attn_ext::cpu
