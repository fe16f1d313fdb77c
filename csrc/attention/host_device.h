// One spelling for functions that both nvcc and the host compiler compile.
#pragma once

#if defined(__CUDACC__)
#define FLASH_HOST_DEVICE __host__ __device__ __forceinline__
#elif defined(__GNUC__)
// always_inline: the CPU kernels are compiled for several instruction sets, and only what is inlined into such a
// function is compiled for its instruction set.
#define FLASH_HOST_DEVICE inline __attribute__((always_inline))
#else
#define FLASH_HOST_DEVICE inline
#endif
