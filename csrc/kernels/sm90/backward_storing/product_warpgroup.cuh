// A warpgroup that computes dV = P^T dO or dK = scale * dS^T Q of 64 keys.
#pragma once

#include "kernels/epilogue/store_quads.cuh"
#include "kernels/sm90/backward_storing/band_sums.cuh"
#include "kernels/sm90/backward_storing/traits.h"

namespace flash_attn_ext::sm90 {

template <class Traits>
struct ProductWarpgroup {
  using Element = typename Traits::Element;
  using Shared = StoringProductShared<Traits>;
  using Work = typename Shared::Work;

  const StoringArguments& args;
  Shared& shared;
  const int warpgroup;
  typename decltype(Shared::ring)::Position at{};
  typename decltype(Shared::work_ring)::Position work_at{};

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (;;) {
      shared.work_ring.wait_full(work_at);
      const Work& work = shared.work[work_at.stage];
      if (uniform(work.batch) == Work::kEnd) break;
      if (Traits::kDims.qk == Traits::kDims.v || uniform(work.is_dk) != 0) {
        multiply<Traits::kDims.qk>(work);
      } else {
        multiply<Traits::kDims.v>(work);
      }
      __syncwarp();
      if (tile::lane() == 0) ptx::arrive(shared.work_ring.empty[work_at.stage]);
      work_at.advance();
    }
  }

 private:
  template <int kWidth>
  using Sums = tile::WarpgroupAccumulator<kWidth>;

  template <int kWidth>
  __device__ __forceinline__ void multiply(const Work& work) {
    Sums<kWidth> sums;
    begin(work, sums);
    if constexpr (Traits::kSkipsTiles) {
      visit_stored<kWidth>(sums);
    } else {
      visit_all<kWidth>(work, sums);
    }
    if (args.tiles.ends_matrix()) {
      store(work, sums);
    } else {
      BandSums<Sums<kWidth>>::leave(sums_of(work), sums);
    }
    __syncwarp();  // converged: else ptxas keeps no descriptor in uniform registers
  }

  // Where the queries of a launch are a band: on top of what those before it gave.
  template <class Acc>
  __device__ __forceinline__ void begin(const Work& work, Acc& sums) const {
    if (args.tiles.begins_matrix()) {
      sums.clear();
    } else {
      BandSums<Acc>::take(sums, sums_of(work));
    }
  }
  __device__ __forceinline__ float* sums_of(const Work& work) const {
    constexpr int kFloats = BandSums<Sums<Traits::kColumns>>::kFloats;
    return args.workspace.key_sums + (int64_t{work.sums} * Traits::kWarpgroups + warpgroup) * kFloats;
  }

  template <int kWidth>
  __device__ __forceinline__ void visit_all(const Work& work, Sums<kWidth>& sums) {
    // Its own come one after the other; the rest see other warpgroups' keys only.
    const TileRange own = work.own[warpgroup];
    const auto group = static_cast<int>(args.params.queries_per_key_head());
    const int visits = uniform(max(work.end - work.begin, 0) * group);
    const int steps = uniform(max(own.end - own.begin, 0) * group);
    const int before = uniform(steps > 0 ? (own.begin - work.begin) * group : visits);
    pass(before);
#pragma unroll 1
    for (int i = 0; i < steps; ++i) step<kWidth>(sums);
    pass(visits - before - steps);
  }

  // Where a mask may leave tiles out: the producer says of each visit whose keys have one.
  template <int kWidth>
  __device__ __forceinline__ void visit_stored(Sums<kWidth>& sums) {
#pragma unroll 1
    for (;;) {
      shared.ring.wait_full(at);
      const int visit = uniform(shared.visits[at.stage]);
      if (visit == Shared::kEnd) break;
      if (visit >> warpgroup & 1) {
        step<kWidth>(sums);
      } else {
        release();
      }
    }
    release();
  }

  template <int kWidth>
  __device__ __forceinline__ void step(Sums<kWidth>& sums) {
    using RightTile = typename Traits::template RightTile<kWidth>;
    at.stage = uniform(at.stage);
    shared.ring.wait_full(at);
    // A narrower tile lies at the beginning of its place.
    const auto right = tile::BoxOperand(shared.right[0]).after(at.stage).template as<RightTile>();
    const auto left = tile::BoxOperand(shared.left[0][0]).after(at.stage * Traits::kWarpgroups + warpgroup);
    tile::add_transposed_product(sums, left, right);
    ptx::wait_products<0>();
    ptx::pin_registers(sums.c[0]);
    release();
  }

  // Tiles of queries that see only other warpgroups' keys.
  __device__ __forceinline__ void pass(int visits) {
#pragma unroll 1
    for (int i = 0; i < visits; ++i) {
      shared.ring.wait_full(at);
      release();
    }
  }

  __device__ __forceinline__ void release() {
    __syncwarp();
    if (tile::lane() == 0) ptx::arrive(shared.ring.empty[at.stage]);
    at.advance();
  }

  // Rows of the sums are keys in the order of stored tiles (ScoreTiles): two warps have 32 neighbouring ones, each
  // every second group of four.
  static constexpr int kHalf = ScoreTiles::kRows / 2;
  __device__ __forceinline__ static int warp_in_half() { return tile::warp() % 2; }
  __device__ __forceinline__ int first_of_half() const {
    return warpgroup * Traits::kRows + tile::warp() % 4 / 2 * kHalf;
  }
  __device__ __forceinline__ static int key_in_half(int r) {
    const int place = tile::lane() / 4;
    return 8 * (place / 2) + 4 * warp_in_half() + 2 * r + place % 2;
  }

  template <class Acc>
  __device__ __forceinline__ void store(const Work& work, Acc& sums) const {
    const attention::BackwardParams& p = args.params;
    const bool is_dk = work.is_dk;
    const attention::MatrixView& to = is_dk ? p.dk : p.dv;
    const int first_key = work.tile * Traits::kRows + first_of_half();
    const int rows = work.seen.num_keys - first_key;
    if (rows <= 0) return;
    if (is_dk) sums.scale(static_cast<float>(p.score_mod.scale));
    const bool suspicious =
        store_row_chunks<Element>({.data = to.row<Element>(work.batch, work.key_head, work.key_begin + first_key),
                                   .row_stride = to.row_stride,
                                   .column_stride = to.column_stride,
                                   .rows = rows,
                                   .columns = static_cast<int>(is_dk ? p.head_dim_qk : p.head_dim_v)},
                                  sums, [](int r) { return key_in_half(r); });
    if (suspicious) args.workspace.dkdv_nan_flags[work.flags + first_of_half() / kHalf] = 1;
  }
};

}  // namespace flash_attn_ext::sm90
