// What the kernel that divides keys is told, beside what the host tells every backend.
#pragma once

#include "attention/append.h"
#include "kernels/common/rows/merged_row.cuh"
#include "kernels/schedule/key_division.cuh"

namespace flash_attn_ext::sm80 {

struct SplitParams : attention::AppendingForwardParams {
  KeyDivision division;
  common::PartRows parts;
  ItemParts* items;  // one for each item
};

}  // namespace flash_attn_ext::sm80
