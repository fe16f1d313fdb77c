#include "kernels/sm90/backward_storing/launch.cuh"

namespace flash_attn_ext::sm90 {

// In one file: those that share the kernel of the products.
template cudaError_t backward_storing<__nv_bfloat16, HeadDims{64, 64}, Variant::kMask>(const attention::BackwardParams&,
                                                                                       const plan::BackwardPlan&, void*,
                                                                                       cudaStream_t);
template cudaError_t backward_storing<__nv_bfloat16, HeadDims{64, 64}, Variant::kBiasMask>(
    const attention::BackwardParams&, const plan::BackwardPlan&, void*, cudaStream_t);
template cudaError_t backward_storing<__nv_bfloat16, HeadDims{64, 64}, Variant::kExtended>(
    const attention::BackwardParams&, const plan::BackwardPlan&, void*, cudaStream_t);

}  // namespace flash_attn_ext::sm90
