// What all kernels for Hopper share: the resources of an SM, and head dims.
#pragma once

#include <cstdint>

namespace flash_attn_ext::sm90 {

// The shared memory that a CTA may have on compute capability 9.0 with `ctas` CTAs per SM. Each CTA reserves 1 KiB.
constexpr int shared_bytes(int ctas) { return (228 / ctas - 1) * 1024; }
inline constexpr int kSharedBytes = shared_bytes(1);

// Head dims that kernels are compiled for. Smaller ones are zero-padded.
struct HeadDims {
  int qk;
  int v;
  bool operator==(const HeadDims&) const = default;

  constexpr bool fit(int64_t head_dim_qk, int64_t head_dim_v) const { return head_dim_qk <= qk && head_dim_v <= v; }
};

// Whether a CTA has as many registers as its warpgroups acquire. They share the registers that each thread has when the
// kernel starts, a multiple of 8; a warpgroup that acquires more would wait forever.
constexpr bool has_registers(int warpgroups, int registers, int producer_registers, int ctas_per_sm = 1) {
  const int at_start = 65536 / (128 * (warpgroups + 1) * ctas_per_sm) / 8 * 8;
  return warpgroups * registers + producer_registers <= (warpgroups + 1) * at_start;
}

}  // namespace flash_attn_ext::sm90
