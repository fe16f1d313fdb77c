// The accesses of csrc/ptx/global_memory.h that order others. Here all of them are in order.
#pragma once

namespace flash_attn_ext::ptx {

inline int load_acquire(const int* source) {
  device::step();
  device::fibers().yield();  // who asks in a loop lets others go on
  return *source;
}
inline void raise_releasing(int* target, int value) {
  device::step();
  if (*target < value) *target = value;
}

}  // namespace flash_attn_ext::ptx
