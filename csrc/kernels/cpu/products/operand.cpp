#include "kernels/cpu/products/operand.h"

#include <algorithm>
#include <type_traits>

#include "kernels/cpu/element.h"
#include "kernels/cpu/rows/row_ops.h"
#include "kernels/cpu/scratch.h"

namespace flash_attn_ext::cpu {
namespace {

using attention::ElementType;

template <class Real>
constexpr ElementType kElementOf = std::is_same_v<Real, double> ? ElementType::kFloat64 : ElementType::kFloat32;

template <class Element, class Real>
void convert(Real* out, const Element* elements, int64_t n) {
  if constexpr (std::is_same_v<Element, c10::BFloat16> && std::is_same_v<Real, float>) {
    convert_row(out, reinterpret_cast<const uint16_t*>(elements), n);
  } else {
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<Real>(elements[i]);
  }
}

// Transposes go by blocks of as many rows and columns: on both sides of them whole cache lines are read and written.
constexpr int64_t kBlock = 16;

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
void load_transposed(const Operand& operand, const RowRange& rows, int64_t width, Block<Real> out) {
  with_element(operand.element, [&](auto* type) {
    using Element = std::remove_pointer_t<decltype(type)>;
    const int64_t stride = operand.view.column_stride;
    Real block[kBlock][kBlock] = {};
    for (int64_t row = 0; row < rows.count; row += kBlock) {
      const int64_t num_rows = std::min(kBlock, rows.count - row);
      for (int64_t column = 0; column < operand.columns; column += kBlock) {
        const int64_t num_columns = std::min(kBlock, operand.columns - column);
        for (int64_t i = 0; i < num_rows; ++i) {
          const Element* source = operand.view.row<const Element>(rows.batch, rows.head, rows.begin + row + i);
          for (int64_t j = 0; j < num_columns; ++j) block[j][i] = static_cast<Real>(source[(column + j) * stride]);
        }
        for (int64_t j = 0; j < num_columns; ++j) std::copy_n(block[j], num_rows, out.row(column + j) + row);
      }
    }
  });
  for (int64_t j = 0; j < operand.columns; ++j) {
    std::fill(out.row(j) + rows.count, out.row(j) + width, Real(0));
  }
}

template <class Real>
void store_rows(const Operand& operand, const RowRange& rows, Block<const Real> values) {
  with_element(operand.element, [&](auto* type) {
    using Element = std::remove_pointer_t<decltype(type)>;
    for (int64_t i = 0; i < rows.count; ++i) {
      Element* target = operand.view.row<Element>(rows.batch, rows.head, rows.begin + i);
      for (int64_t j = 0; j < operand.columns; ++j) {
        target[j * operand.view.column_stride] = static_cast<Element>(values.row(i)[j]);
      }
    }
  });
}

template <class Real>
void store_transposed(const Operand& operand, const RowRange& rows, Block<const Real> values, Real scale) {
  Scratch<Real> transposed(kBlock * operand.columns);
  for (int64_t row = 0; row < rows.count; row += kBlock) {
    const int64_t num_rows = std::min(kBlock, rows.count - row);
    for (int64_t j = 0; j < operand.columns; ++j) {
      const Real* source = values.row(j) + row;
      for (int64_t i = 0; i < num_rows; ++i) transposed.data()[i * operand.columns + j] = scale * source[i];
    }
    const RowRange range = {rows.batch, rows.head, rows.begin + row, num_rows};
    store_rows<Real>(operand, range, {transposed.data(), operand.columns});
  }
}

#define FLASH_INSTANTIATE(Real)                                                                   \
  template void store_transposed<Real>(const Operand&, const RowRange&, Block<const Real>, Real); \
  template bool Operand::readable_in_place<Real>() const;                                         \
  template void convert_rows<Real>(const Operand&, const RowRange&, Real*);                       \
  template Block<const Real> load_rows<Real>(const Operand&, const RowRange&, Real*);             \
  template void load_transposed<Real>(const Operand&, const RowRange&, int64_t, Block<Real>);     \
  template void store_rows<Real>(const Operand&, const RowRange&, Block<const Real>);
FLASH_INSTANTIATE(float)
FLASH_INSTANTIATE(double)
#undef FLASH_INSTANTIATE

}  // namespace flash_attn_ext::cpu
