// The arguments of a forward kernel, beyond those that every backend gets.
#pragma once

#include <cstdint>

#include "attention/params.h"

namespace flash_attn_ext::sm80 {

struct ForwardParams : attention::ForwardParams {
  uint8_t* nan_flags = nullptr;  // one per warp: whether its rows have a NaN (nan_flags.cuh)
};

}  // namespace flash_attn_ext::sm80
