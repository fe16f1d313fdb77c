// Division on the device by a number that the host knows.
#pragma once

#include <cstdint>

#include "attention/host_device.h"

namespace flash_attn_ext::attention {

// Divides numbers below 2^31 by multiplying (Granlund & Montgomery 1994, "Division by invariant integers using
// multiplication", section 4).
struct Divisor {
  uint32_t divisor;
  uint32_t multiplier;
  uint32_t shift;

  static Divisor of(uint32_t divisor) {
    uint32_t bits = 0;  // 2^bits >= divisor
    while ((uint64_t{1} << bits) < divisor) ++bits;
    return {divisor, static_cast<uint32_t>((uint64_t{1} << (31 + bits)) / divisor + 1), 31 + bits};
  }
  FLASH_HOST_DEVICE uint32_t quotient(uint32_t n) const {
    return static_cast<uint32_t>((uint64_t{n} * multiplier) >> shift);
  }
};

}  // namespace flash_attn_ext::attention
