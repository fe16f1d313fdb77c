// wgmma, one instruction each: d (64 x kColumns, float32) = a . b, added to d where `accumulate`. They run
// asynchronously: between the fence and the wait nothing may access d, nor a where it is in registers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace flash_attn_ext::ptx {

// PTX ISA, wgmma.fence: orders accesses to registers before the wgmma that follow.
__device__ __forceinline__ void fence_wgmma() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// PTX ISA, wgmma.commit_group: the wgmma issued so far form a group.
__device__ __forceinline__ void commit_wgmma() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// PTX ISA, wgmma.wait_group: waits until at most kPending groups are in flight.
template <int kPending>
__device__ __forceinline__ void wait_wgmma() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// PTX ISA, bar.warp.sync, of all lanes, since `value` is never negative. ptxas hoists a wait for wgmma above arithmetic
// that does not read their results, so that the arithmetic no longer overlaps them. The computation of `value` stays
// before this instruction, and so before the wait.
__device__ __forceinline__ void compute_before_wait(float value) {
  const uint32_t lanes = value < 0.0f ? 0x7FFFFFFFu : 0xFFFFFFFFu;
  asm volatile("bar.warp.sync %0;" ::"r"(lanes) : "memory");
}

// Declares the contents of accumulators dead before a wgmma that does not add to them. If they were pinned, they would
// occupy registers until the wgmma.
template <int kTiles>
__device__ __forceinline__ void renew_registers(float (&d)[kTiles][4]) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    asm volatile("" : "=f"(d[i][0]), "=f"(d[i][1]), "=f"(d[i][2]), "=f"(d[i][3])::"memory");
  }
}

// Pins accumulators in their registers, so that the compiler moves no access across a fence or a wait.
template <int kTiles>
__device__ __forceinline__ void pin_registers(float (&d)[kTiles][4]) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    asm volatile("" : "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])::"memory");
  }
}

// Operands of the asm statements below: the registers of 8 columns each, and their operand numbers.
#define FLASH_D4(d, i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define FLASH_D16(d, i) FLASH_D4(d, i), FLASH_D4(d, i + 1), FLASH_D4(d, i + 2), FLASH_D4(d, i + 3)
#define FLASH_ALL16(d) FLASH_D16(d, 0)
#define FLASH_D24(d) FLASH_D16(d, 0), FLASH_D4(d, 4), FLASH_D4(d, 5)
#define FLASH_D32(d) FLASH_D16(d, 0), FLASH_D16(d, 4)
#define FLASH_D40(d) FLASH_D32(d), FLASH_D4(d, 8), FLASH_D4(d, 9)
#define FLASH_D48(d) FLASH_D32(d), FLASH_D16(d, 8)
#define FLASH_D56(d) FLASH_D48(d), FLASH_D4(d, 12), FLASH_D4(d, 13)
#define FLASH_D64(d) FLASH_D48(d), FLASH_D16(d, 12)
#define FLASH_D96(d) FLASH_D64(d), FLASH_D16(d, 16), FLASH_D16(d, 20)
#define FLASH_D128(d) FLASH_D96(d), FLASH_D16(d, 24), FLASH_D16(d, 28)
#define FLASH_N16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define FLASH_N24 FLASH_N16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define FLASH_N32 \
  FLASH_N16       \
  ", "            \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FLASH_N40 \
  FLASH_N32       \
  ", "            \
  "%32, %33, %34, %35, %36, %37, %38, %39"
#define FLASH_N48 \
  FLASH_N32       \
  ", "            \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define FLASH_N56 \
  FLASH_N48       \
  ", "            \
  "%48, %49, %50, %51, %52, %53, %54, %55"
#define FLASH_N64 \
  FLASH_N48       \
  ", "            \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FLASH_N96                                                                    \
  FLASH_N64                                                                          \
  ", "                                                                               \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define FLASH_N128                                                                               \
  FLASH_N96                                                                                      \
  ", "                                                                                           \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define FLASH_N36 FLASH_N32 ", %32, %33, %34, %35"
#define FLASH_N68 FLASH_N64 ", %64, %65, %66, %67"
#define FLASH_N100 FLASH_N96 ", %96, %97, %98, %99"

// PTX ISA, wgmma.mma_async with both operands in shared memory (SS). layout: whether a and b are transposed, that is,
// whether their inner dimension runs across rows.
#define FLASH_WGMMA_SS(name, layout, Element, type, columns, registers, numbers, a, b, flag)                       \
  __device__ __forceinline__ void name(float(&d)[columns / 8][4], uint64_t left, uint64_t right, bool accumulate,  \
                                       Element) {                                                                  \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " flag                                                             \
                 ", 0;\n"                                                                                          \
                 "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type " {" numbers "}, " a ", " b \
                 ", p, 1, 1, " layout ";}\n"                                                                       \
                 : registers(d)                                                                                    \
                 : "l"(left), "l"(right), "r"(static_cast<int>(accumulate)));                                      \
  }
#define FLASH_WGMMAS_SS(name, layout, columns, registers, numbers, a, b, flag)                 \
  FLASH_WGMMA_SS(name, layout, __nv_bfloat16, "bf16", columns, registers, numbers, a, b, flag) \
  FLASH_WGMMA_SS(name, layout, __half, "f16", columns, registers, numbers, a, b, flag)

// d = a . b^T: rows of 16 inner elements.
FLASH_WGMMAS_SS(multiply_async, "0, 0", 32, FLASH_ALL16, FLASH_N16, "%16", "%17", "%18")
FLASH_WGMMAS_SS(multiply_async, "0, 0", 48, FLASH_D24, FLASH_N24, "%24", "%25", "%26")
FLASH_WGMMAS_SS(multiply_async, "0, 0", 64, FLASH_D32, FLASH_N32, "%32", "%33", "%34")
FLASH_WGMMAS_SS(multiply_async, "0, 0", 80, FLASH_D40, FLASH_N40, "%40", "%41", "%42")
FLASH_WGMMAS_SS(multiply_async, "0, 0", 96, FLASH_D48, FLASH_N48, "%48", "%49", "%50")
FLASH_WGMMAS_SS(multiply_async, "0, 0", 112, FLASH_D56, FLASH_N56, "%56", "%57", "%58")
FLASH_WGMMAS_SS(multiply_async, "0, 0", 128, FLASH_D64, FLASH_N64, "%64", "%65", "%66")

// d = a . b: rows of 16 inner elements of a, 16 rows of b.
FLASH_WGMMAS_SS(multiply_by_rows_async, "0, 1", 64, FLASH_D32, FLASH_N32, "%32", "%33", "%34")
FLASH_WGMMAS_SS(multiply_by_rows_async, "0, 1", 96, FLASH_D48, FLASH_N48, "%48", "%49", "%50")
FLASH_WGMMAS_SS(multiply_by_rows_async, "0, 1", 128, FLASH_D64, FLASH_N64, "%64", "%65", "%66")

// d = a^T . b: 16 rows of both.
FLASH_WGMMAS_SS(multiply_transposed_async, "1, 1", 64, FLASH_D32, FLASH_N32, "%32", "%33", "%34")
FLASH_WGMMAS_SS(multiply_transposed_async, "1, 1", 128, FLASH_D64, FLASH_N64, "%64", "%65", "%66")
FLASH_WGMMAS_SS(multiply_transposed_async, "1, 1", 192, FLASH_D96, FLASH_N96, "%96", "%97", "%98")

// PTX ISA, wgmma.mma_async with a (64 x 16) in registers (RS).
#define FLASH_WGMMA_RS(name, layout, Element, type, columns, registers, numbers, a, b, flag)                         \
  __device__ __forceinline__ void name(float(&d)[columns / 8][4], const uint32_t(&left)[4], uint64_t right,          \
                                       bool accumulate, Element) {                                                   \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " flag                                                               \
                 ", 0;\n"                                                                                            \
                 "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type " {" numbers "}, {" a "}, " b \
                 ", p, 1, 1, " layout ";}\n"                                                                         \
                 : registers(d)                                                                                      \
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right),                               \
                   "r"(static_cast<int>(accumulate)));                                                               \
  }
#define FLASH_WGMMAS_RS(name, layout, columns, registers, numbers, a, b, flag)                 \
  FLASH_WGMMA_RS(name, layout, __nv_bfloat16, "bf16", columns, registers, numbers, a, b, flag) \
  FLASH_WGMMA_RS(name, layout, __half, "f16", columns, registers, numbers, a, b, flag)

// d = a . b^T: rows of 16 inner elements.
FLASH_WGMMAS_RS(multiply_rows_async, "0", 64, FLASH_D32, FLASH_N32, "%32, %33, %34, %35", "%36", "%37")

// d = a . b: 16 rows of b.
FLASH_WGMMAS_RS(multiply_async, "1", 64, FLASH_D32, FLASH_N32, "%32, %33, %34, %35", "%36", "%37")
FLASH_WGMMAS_RS(multiply_async, "1", 80, FLASH_D40, FLASH_N40, "%40, %41, %42, %43", "%44", "%45")
FLASH_WGMMAS_RS(multiply_async, "1", 96, FLASH_D48, FLASH_N48, "%48, %49, %50, %51", "%52", "%53")
FLASH_WGMMAS_RS(multiply_async, "1", 128, FLASH_D64, FLASH_N64, "%64, %65, %66, %67", "%68", "%69")
FLASH_WGMMAS_RS(multiply_async, "1", 192, FLASH_D96, FLASH_N96, "%96, %97, %98, %99", "%100", "%101")
FLASH_WGMMAS_RS(multiply_async, "1", 256, FLASH_D128, FLASH_N128, "%128, %129, %130, %131", "%132", "%133")

// The same with 8 more columns of b, whose results go to separate registers.
#define FLASH_WGMMA_RS_WIDER(Element, type, columns, wider, registers, numbers, a, b, flag)                            \
  __device__ __forceinline__ void multiply_async(float(&d)[columns / 8][4], float(&sums)[1][4],                        \
                                                 const uint32_t(&left)[4], uint64_t right, bool accumulate, Element) { \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " flag                                                                 \
                 ", 0;\n"                                                                                              \
                 "wgmma.mma_async.sync.aligned.m64n" #wider "k16.f32." type "." type " {" numbers "}, {" a "}, " b     \
                 ", p, 1, 1, 1;}\n"                                                                                    \
                 : registers(d), FLASH_D4(sums, 0)                                                                     \
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right),                                 \
                   "r"(static_cast<int>(accumulate)));                                                                 \
  }
#define FLASH_WGMMAS_RS_WIDER(columns, wider, registers, numbers, a, b, flag)                 \
  FLASH_WGMMA_RS_WIDER(__nv_bfloat16, "bf16", columns, wider, registers, numbers, a, b, flag) \
  FLASH_WGMMA_RS_WIDER(__half, "f16", columns, wider, registers, numbers, a, b, flag)

FLASH_WGMMAS_RS_WIDER(64, 72, FLASH_D32, FLASH_N36, "%36, %37, %38, %39", "%40", "%41")
FLASH_WGMMAS_RS_WIDER(128, 136, FLASH_D64, FLASH_N68, "%68, %69, %70, %71", "%72", "%73")
FLASH_WGMMAS_RS_WIDER(192, 200, FLASH_D96, FLASH_N100, "%100, %101, %102, %103", "%104", "%105")

#undef FLASH_WGMMAS_RS_WIDER
#undef FLASH_WGMMA_RS_WIDER
#undef FLASH_WGMMAS_RS
#undef FLASH_WGMMA_RS
#undef FLASH_WGMMAS_SS
#undef FLASH_WGMMA_SS

}  // namespace flash_attn_ext::ptx
