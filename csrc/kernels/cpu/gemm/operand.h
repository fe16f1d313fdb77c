// Rows of q, k, v, out and dout as the GEMMs of tiles need them: in the compute type, contiguous or transposed.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <type_traits>

#include "attention/params.h"
#include "attention/score_mod.h"
#include "kernels/cpu/gemm/tile_gemm.h"
#include "kernels/cpu/rows/narrow_float.h"

namespace flash_attn_ext::cpu {

// The type in which elements are computed.
template <class Element>
using ComputeType = std::conditional_t<std::is_same_v<Element, double>, double, float>;

// Calls function with a null pointer of the element's C++ type.
template <class Function>
void with_element(attention::ElementType element, Function&& function) {
  switch (element) {
    case attention::ElementType::kFloat32:
      return function(static_cast<float*>(nullptr));
    case attention::ElementType::kFloat64:
      return function(static_cast<double*>(nullptr));
    case attention::ElementType::kBFloat16:
      return function(static_cast<BFloat16*>(nullptr));
    case attention::ElementType::kFloat16:
      return function(static_cast<Float16*>(nullptr));
    case attention::ElementType::kBool:
      break;
  }
  throw std::logic_error("a bool tensor is no matrix operand");
}

// A run of rows of one head of a tensor.
struct RowRange {
  int64_t batch;
  int64_t head;
  int64_t begin;
  int64_t count;
};

// A tensor and its number of columns (its head dim).
struct Operand {
  attention::MatrixView view;
  attention::ElementType element;
  int64_t columns;

  // Whether a kernel that computes in Real can read its rows where they are.
  template <class Real>
  bool readable_in_place() const;
};

// out (count x columns) = the rows.
template <class Real>
void convert_rows(const Operand& operand, const RowRange& rows, Real* out);

// Returns the rows in place if they can be read there, and otherwise converts them into scratch (count x columns).
template <class Real>
Block<const Real> load_rows(const Operand& operand, const RowRange& rows, Real* scratch);

// Whether every element of a block is finite.
template <class Real>
bool all_finite(Block<const Real> block, int64_t rows, int64_t columns);

// out (columns x width) = the rows, transposed and zero-padded to `width` columns.
template <class Real>
void load_transposed(const Operand& operand, const RowRange& rows, int64_t width, Block<Real> out);

// Row i = factors[i] * values(i), converted to the tensor's own type. The second form has one factor for all rows.
template <class Real>
void store_rows(const Operand& operand, const RowRange& rows, Block<const Real> values, const Real* factors);
template <class Real>
void store_rows(const Operand& operand, const RowRange& rows, Block<const Real> values, Real factor);

}  // namespace flash_attn_ext::cpu
