#include "kernels/sm90/backward_storing/launch.cuh"

namespace flash_attn_ext::sm90 {

// In one file: those that share the kernel of the products.
template cudaError_t backward_storing<__half, HeadDims{128, 128}, Variant::kMask>(const attention::BackwardParams&,
                                                                                  const plan::BackwardPlan&, void*,
                                                                                  cudaStream_t);
template cudaError_t backward_storing<__half, HeadDims{128, 128}, Variant::kBiasMask>(const attention::BackwardParams&,
                                                                                      const plan::BackwardPlan&, void*,
                                                                                      cudaStream_t);
template cudaError_t backward_storing<__half, HeadDims{128, 128}, Variant::kExtended>(const attention::BackwardParams&,
                                                                                      const plan::BackwardPlan&, void*,
                                                                                      cudaStream_t);

}  // namespace flash_attn_ext::sm90
