// Compiles a function several times, for the instruction sets below, and picks one when the library is loaded: the
// binary runs on any machine of its architecture and is still vectorised as widely as this one allows.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
// Levels of the architecture, not names of processors: those would match one vendor's only.
#define FLASH_SIMD_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FLASH_SIMD_CLONES
#endif

// What it calls must be inlined into it to be compiled for the same instruction set.
#if defined(__GNUC__)
#define FLASH_SIMD_INLINE inline __attribute__((always_inline))
#else
#define FLASH_SIMD_INLINE inline
#endif
