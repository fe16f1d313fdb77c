// Compiles a function several times, for the instruction sets below, and picks one when the library is loaded. So the
// binary runs on any machine of its architecture, with the widest vectors that the machine has.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__)
// Levels of the architecture, with vectors of 64 and of 32 bytes. Names of processors would match those of one vendor
// only. Clang, and GCC before version 12, choose among single features, not among levels.
#if defined(__clang__)
#define FLASH_SIMD_64 "avx512f"
#define FLASH_SIMD_32 "avx2,fma"
#if __clang_major__ >= 18
#define FLASH_SIMD_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))  // a comma begins another clone
#else
#define FLASH_SIMD_CLONES  // before 18, other files would not find the function under its name
#endif
#else
#if __GNUC__ >= 12
#define FLASH_SIMD_64 "arch=x86-64-v4"
#define FLASH_SIMD_32 "arch=x86-64-v3"
#else
#define FLASH_SIMD_64 "avx512f"
#define FLASH_SIMD_32 "avx2"
#endif
#define FLASH_SIMD_CLONES __attribute__((target_clones(FLASH_SIMD_64, FLASH_SIMD_32, "default")))
#endif
// One of several definitions of a function, for code that depends on how many registers there are, and of what length.
// The name must not be seen outside its file: other files would call the definition of the oldest level.
#define FLASH_SIMD_LEVEL(level) __attribute__((target(level)))
#else
#define FLASH_SIMD_CLONES
#endif

// What it calls must be inlined into it to be compiled for the same instruction set.
#if defined(__GNUC__)
#define FLASH_SIMD_INLINE inline __attribute__((always_inline))
#else
#define FLASH_SIMD_INLINE inline
#endif
