// What a plan may count on.
#pragma once

#include <ATen/core/Tensor.h>

#include "kernels/plan/plan.h"

namespace flash_attn_ext::host {

// Of the device. FLASH_ATTN_EXT_WORKSPACE_MIB, read at each call, bounds the scores that a backward pass stores: by
// default 2 GiB, and not more than a 40th of the device's memory; 0: none, they are computed again.
// FLASH_ATTN_EXT_MULTIPROCESSORS, likewise, stands for the device's own number, so that keys are divided as on a device
// that has as many. Throws ValueError when one of them is no whole number in its range.
plan::Limits limits_of(at::Device device);

// Throws ValueError when a plan made for more multiprocessors than the device has needs them all at the same time.
void require_multiprocessors(const plan::BackwardPlan& plan, at::Device device);

}  // namespace flash_attn_ext::host
