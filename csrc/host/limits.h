// What a plan may count on.
#pragma once

#include <ATen/core/Tensor.h>

#include "kernels/plan/plan.h"

namespace flash_attn_ext::host {

// Of the device. FLASH_ATTN_EXT_WORKSPACE_MIB, read at each call, bounds the scores that a backward pass stores: by
// default 2 GiB, and not more than a 64th of the device's memory; 0: none, they are computed again. Throws ValueError
// when it is no whole number of 0 or more.
plan::Limits limits_of(at::Device device);

}  // namespace flash_attn_ext::host
