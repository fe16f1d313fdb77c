// Launches the dK/dV and dQ kernels that a plan names.
#pragma once

#include <algorithm>

#include "kernels/sm80/backward/backward_dkdv.cuh"
#include "kernels/sm80/backward/backward_dq.cuh"
#include "kernels/sm80/launch.cuh"
#include "kernels/sm80/sm80_kernels.h"

namespace flash_attn_ext::sm80 {

template <class Kernel>
cudaError_t launch_dkdv(const BackwardParams& p, const BackwardPlan& plan, cudaStream_t stream) {
  const Schedule schedule =
      make_schedule(p, {.pairs = {p.first_pair, p.num_pairs},
                        .rows = Rows::kKeys,
                        .tile_rows = Kernel::kTile.keys,
                        .slices = num_slices(std::max(p.head_dim_qk, p.head_dim_v), Kernel::kTile.columns),
                        .element_bytes = sizeof(typename Kernel::Element),
                        .l2_bytes = plan.l2_bytes});
  const cudaError_t error = launch<Kernel>(backward_dkdv_kernel<Kernel>, p, schedule, stream);
  if (error != cudaSuccess) return error;
  const common::FlaggedRows keys = flagged_rows<Kernel>(p.dkdv_nan_flags, schedule);
  return common::repair_gradients<InMemory<typename Kernel::Element>>(p, {}, keys, stream);
}

template <class Element, int kHeadDim>
cudaError_t backward_dkdv(const BackwardParams& p, const BackwardPlan& plan, cudaStream_t stream) {
  return with_row_of<kDkdvConfigs, Element, kHeadDim>(plan.dkdv_row, [&](auto row) {
    using Kernel = BackwardDkdvKernel<KernelTraits<Element, kDkdvConfigs[row()]>>;
    if (Kernel::kBoth || p.dk.data == nullptr || p.dv.data == nullptr) return launch_dkdv<Kernel>(p, plan, stream);
    BackwardParams of_one = p;
    of_one.dk.data = nullptr;
    const cudaError_t error = launch_dkdv<Kernel>(of_one, plan, stream);
    if (error != cudaSuccess) return error;
    of_one = p;
    of_one.dv.data = nullptr;
    return launch_dkdv<Kernel>(of_one, plan, stream);
  });
}

template <class Element, int kHeadDim>
cudaError_t backward_dq(const BackwardParams& p, const BackwardPlan& plan, cudaStream_t stream) {
  return with_row_of<kDqConfigs, Element, kHeadDim>(plan.dq_row, [&](auto row) {
    using Kernel = BackwardDqKernel<KernelTraits<Element, kDqConfigs[row()]>>;
    const Schedule schedule = make_schedule(p, {.pairs = {p.first_pair, p.num_pairs},
                                                .rows = Rows::kQueries,
                                                .tile_rows = Kernel::kTile.queries,
                                                .slices = num_slices(p.head_dim_qk, Kernel::kTile.columns),
                                                .splits = plan.dq_splits,
                                                .element_bytes = sizeof(Element),
                                                .l2_bytes = plan.l2_bytes});
    const cudaError_t error = launch<Kernel>(backward_dq_kernel<Kernel>, p, schedule, stream);
    if (error != cudaSuccess || plan.dq_splits > 1) return error;  // the kernel that sums partial dQ repairs rows, too
    const common::FlaggedRows queries = flagged_rows<Kernel>(p.dq_nan_flags, schedule);
    return common::repair_gradients<InMemory<Element>>(p, queries, {}, stream);
  });
}

}  // namespace flash_attn_ext::sm80
