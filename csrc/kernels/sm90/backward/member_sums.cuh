// dK and dV of keys whose query heads have claims of their own (VisitOrder::members).
//
// Each claim leaves its part in memory and counts itself; the last one to come adds all parts up, in the order of
// heads, whoever it is. So nobody waits, and sums repeat bit for bit. Parts are in the order of accumulators.
//
// Between blocks: a barrier orders the warpgroup's stores before one thread's addition, which releases them and
// acquires those of earlier members; another barrier hands that on. PTX ISA, "causality order".
#pragma once

#include "kernels/sm90/backward/traits.h"
#include "ptx/global_memory.h"

namespace flash_attn_ext::sm90 {

template <class Traits>
struct MemberSums {
  using Dk = tile::WarpgroupAccumulator<Traits::kDims.qk>;
  using Dv = tile::WarpgroupAccumulator<Traits::kDims.v>;

  const BackwardArguments& args;
  const KeyTileWork& work;
  const int warpgroup;

  // True: dk and dv are the sums, to be stored.
  __device__ __forceinline__ bool join(Dk& dk, Dv& dv, int& arrived) const {
    const auto members = static_cast<int>(args.order.members);
    float* const own = part_of(work.member);
    leave(own, dv);
    leave(own + kDvFloats, dk);
    meet();
    if (thread() == 0) {
      arrived =
          ptx::add_releasing_acquiring(args.workspace.arrivals + work.number * Traits::kWarpgroups + warpgroup, 1);
    }
    meet();
    if (uniform(arrived) + 1 < members) return false;
    dk.clear();
    dv.clear();
#pragma unroll 1
    for (int member = 0; member < members; ++member) {
      const float* const part = part_of(member);
      add(dv, part);
      add(dk, part + kDvFloats);
    }
    return true;
  }

 private:
  static constexpr int kThreads = tile::kWarpgroupSize;
  static constexpr int kDvFloats = Dv::kColumnTiles * 4 * kThreads;
  static constexpr int kFloats = kDvFloats + Dk::kColumnTiles * 4 * kThreads;

  __device__ __forceinline__ static int thread() { return static_cast<int>(threadIdx.x) % kThreads; }
  __device__ __forceinline__ void meet() const { meet_key_warpgroup(warpgroup); }

  __device__ __forceinline__ float* part_of(int member) const {
    const int64_t tile = int64_t{work.number} * args.order.members + member;
    return args.workspace.key_sums + (tile * Traits::kWarpgroups + warpgroup) * kFloats + thread() * 4;
  }
  template <class Acc>
  __device__ __forceinline__ static void leave(float* to, const Acc& sums) {
#pragma unroll
    for (int j = 0; j < Acc::kColumnTiles; ++j) {
      const float(&c)[4] = sums.c[0][j];
      *reinterpret_cast<float4*>(to + j * kThreads * 4) = {c[0], c[1], c[2], c[3]};
    }
  }
  template <class Acc>
  __device__ __forceinline__ static void add(Acc& sums, const float* from) {
#pragma unroll
    for (int j = 0; j < Acc::kColumnTiles; ++j) {
      const float4 part = __ldcg(reinterpret_cast<const float4*>(from + j * kThreads * 4));
      float(&c)[4] = sums.c[0][j];
      c[0] += part.x;
      c[1] += part.y;
      c[2] += part.z;
      c[3] += part.w;
    }
  }
};

}  // namespace flash_attn_ext::sm90
