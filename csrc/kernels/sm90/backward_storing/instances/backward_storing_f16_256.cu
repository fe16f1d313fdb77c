#include "kernels/sm90/backward_storing/launch.cuh"

namespace flash_attn_ext::sm90 {

template cudaError_t backward_storing<__half, HeadDims{256, 256}, Variant::kPlain>(const attention::BackwardParams&,
                                                                                   const plan::BackwardPlan&, void*,
                                                                                   cudaStream_t);

template cudaError_t backward_storing<__half, HeadDims{256, 256}, Variant::kMask>(const attention::BackwardParams&,
                                                                                  const plan::BackwardPlan&, void*,
                                                                                  cudaStream_t);

template cudaError_t backward_storing<__half, HeadDims{256, 256}, Variant::kModified>(const attention::BackwardParams&,
                                                                                      const plan::BackwardPlan&, void*,
                                                                                      cudaStream_t);

}  // namespace flash_attn_ext::sm90
