// The limits within which a call is planned.
#pragma once

#include <ATen/core/Tensor.h>

#include "kernels/plan/interface.h"

namespace flash_attn_ext::host {

// The limits of the device. Two environment variables, which are read at each call, replace some of them.
// FLASH_ATTN_EXT_WORKSPACE_MIB bounds the P and dS that a backward pass materialises. The default is 2 GiB, but not
// more than a 40th of the device's memory; with 0 they are recomputed. FLASH_ATTN_EXT_MULTIPROCESSORS replaces the
// number of SMs, so that keys are split as on a device that has as many. Throws ValueError if a variable is not a whole
// number in its range.
plan::Limits limits_of(at::Device device);

// Throws ValueError if a plan that was made for more SMs needs more CTAs at the same time than the device has SMs.
void require_sms(int64_t co_resident_ctas, at::Device device);

}  // namespace flash_attn_ext::host
