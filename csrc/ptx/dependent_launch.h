// Kernels that are launched while the one before them still runs (compute capability 9.0 and later; elsewhere the
// instructions are not there, and neither are such launches).
#pragma once

namespace flash_attn_ext::ptx {

// Whether the code at hand may be launched early.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
inline constexpr bool kLaunchesEarly = true;
#else
inline constexpr bool kLaunchesEarly = false;
#endif

// PTX ISA 9.7.13.13 griddepcontrol: from here on the dependent kernel's blocks may be started.
__device__ __forceinline__ void allow_dependent_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Waits until the kernel before has ended and what it wrote can be read.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace flash_attn_ext::ptx
