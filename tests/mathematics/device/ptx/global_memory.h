// The accesses of csrc/ptx/global_memory.h that order others. Here all accesses are in order.
#pragma once

namespace flash_attn_ext::ptx {

inline int load_acquire(const int* source) {
  device::step();
  device::fibers().yield();  // a thread that polls lets others run
  return *source;
}
inline void raise_releasing(int* target, int value) {
  device::step();
  if (*target < value) *target = value;
}

}  // namespace flash_attn_ext::ptx
