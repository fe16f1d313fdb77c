// Programmatic dependent launch: a kernel starts while the preceding one still runs (compute capability 9.0 and later;
// there is no such launch elsewhere, and the functions do nothing).
#pragma once

namespace flash_attn_ext::ptx {

// Whether this code may be launched early.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
inline constexpr bool kLaunchesEarly = true;
#else
inline constexpr bool kLaunchesEarly = false;
#endif

// PTX ISA 9.7.13.13 griddepcontrol.launch_dependents: CTAs of the dependent kernel may start from here on.
__device__ __forceinline__ void allow_dependent_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// griddepcontrol.wait: waits until the preceding kernel has ended and its writes are visible.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace flash_attn_ext::ptx
