// The C++ type of a tensor's elements.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#include <type_traits>

#include "attention/score_mod.h"

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
      return function(static_cast<c10::BFloat16*>(nullptr));
    case attention::ElementType::kFloat16:
      return function(static_cast<c10::Half*>(nullptr));
    case attention::ElementType::kBool:
      break;
  }
  TORCH_INTERNAL_ASSERT(false, "a bool tensor is no matrix operand");
}

}  // namespace flash_attn_ext::cpu
