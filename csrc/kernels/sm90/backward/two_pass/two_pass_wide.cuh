// The kernels of the two-pass backward pass that only head dims above 256 take: the score kernel, and the GEMM of dQ.
// dV and dK come from the GEMM kernel of two_pass.cuh, a column part at a time.
#pragma once

#include "kernels/sm90/backward/two_pass/dq_gemm.cuh"
#include "kernels/sm90/backward/two_pass/score_kernel.cuh"
#include "kernels/sm90/kernel.cuh"

namespace flash_attn_ext::sm90 {

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    two_pass_score_kernel(const __grid_constant__ TwoPassArguments args) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<TwoPassScoreShared<Traits>*>(shared_memory);
  constexpr int kRegisters = Traits::kConfig.consumer_registers();
  constexpr int kCopyRegisters = Traits::kConfig.producer_registers();
  static_assert(has_registers(Traits::kWarpgroups, kRegisters, kCopyRegisters));
  run_roles<ScoreProducer<Traits>, ScoreWarpgroup<Traits>, RoleRegisters{kCopyRegisters, kRegisters}>(args, shared);
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    two_pass_dq_gemm_kernel(const __grid_constant__ TwoPassArguments args) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<DqGemmShared<Traits>*>(shared_memory);
  constexpr GemmTile kTile = Traits::kTile;
  static_assert(has_registers(kTile.warpgroups, kTile.consumer_registers, kTile.producer_registers));
  run_roles<DqGemmProducer<Traits>, DqGemmWarpgroup<Traits>,
            RoleRegisters{kTile.producer_registers, kTile.consumer_registers}>(args, shared);
}

}  // namespace flash_attn_ext::sm90
