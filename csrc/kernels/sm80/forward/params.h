// What a forward kernel is told, beside what the host tells every backend.
#pragma once

#include <cstdint>

#include "attention/params.h"

namespace flash_attn_ext::sm80 {

struct ForwardParams : attention::ForwardParams {
  uint8_t* nan_flags = nullptr;  // one per warp: whether a NaN came out (nan_flags.cuh)
};

}  // namespace flash_attn_ext::sm80
