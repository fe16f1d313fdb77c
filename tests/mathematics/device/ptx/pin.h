// csrc/ptx/pin.h is about registers.
#pragma once

namespace flash_attn_ext::ptx {

inline int pin(int x) { return x; }

}  // namespace flash_attn_ext::ptx
