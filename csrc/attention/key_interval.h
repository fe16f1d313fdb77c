// What a mask of keys leaves to a batch entry, where that is one interval: padding at either end of a sequence.
#pragma once

#include "attention/host_device.h"

namespace flash_attn_ext::attention {

struct KeyInterval {
  int begin;
  int count;  // kNone: what is left is not an interval

  static constexpr int kNone = -1;

  FLASH_HOST_DEVICE bool exists() const { return count != kNone; }
};

}  // namespace flash_attn_ext::attention
