// Copies from global to shared memory that do not pass through registers.
#pragma once

#include <cstdint>

namespace flash_attn_ext::ptx {

// PTX ISA 9.7.9.25.3 cp.async. Copies the first source_bytes (0..16) of 16 and fills the rest with zeros; both
// addresses are 16-byte aligned. With source_bytes = 0 the source is not read.
__device__ __forceinline__ void copy_async_16(uint32_t shared_address, const void* source, uint32_t source_bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address), "l"(source), "r"(source_bytes));
}

// The same for 4 bytes, all of them or a zero.
__device__ __forceinline__ void copy_async_4(uint32_t shared_address, const void* source, bool read) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address), "l"(source), "r"(read ? 4 : 0));
}

// PTX ISA 9.7.9.25.3.2 cp.async.commit_group: the copies issued so far form a group.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;"); }

// PTX ISA 9.7.9.25.3.3 cp.async.wait_group: at most kPending of this thread's groups are still in flight.
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace flash_attn_ext::ptx
