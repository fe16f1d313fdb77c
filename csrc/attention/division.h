// Divisions: rounded up, into even shares, and on the device by a number that the host knows.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/host_device.h"

namespace flash_attn_ext::attention {

// How many parts of `size` cover `count`, both in their own types.
template <class Count, class Size>
FLASH_HOST_DEVICE constexpr auto ceil_div(Count count, Size size) {
  return (count + size - 1) / size;
}

// The size of a share, at least 1, when `count` is divided evenly into the fewest shares of at most `most`.
inline int64_t even_share(int64_t count, int64_t most) {
  const int64_t shares = std::max<int64_t>(ceil_div(count, most), 1);
  return std::max<int64_t>(ceil_div(count, shares), 1);
}

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
