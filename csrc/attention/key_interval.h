// The keys that a padding mask leaves to a batch entry, if they are one interval, as with padding at either end.
#pragma once

#include "attention/host_device.h"

namespace flash_attn_ext::attention {

struct KeyInterval {
  int begin;
  int count;  // kNone: the keys that are left are not one interval

  static constexpr int kNone = -1;

  FLASH_HOST_DEVICE bool exists() const { return count != kNone; }
};

}  // namespace flash_attn_ext::attention
