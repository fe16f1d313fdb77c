// A forward call, as the host and the scan of its mask describe it.
#pragma once

#include "attention/params.h"
#include "kernels/schedule/key_intervals.cuh"

namespace flash_attn_ext::sm90 {

struct ForwardCall : attention::ForwardParams {
  KeyIntervals intervals;  // present: the launch computes only batch entries that have one, or only the others
};

}  // namespace flash_attn_ext::sm90
