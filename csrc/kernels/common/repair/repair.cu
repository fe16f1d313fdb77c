#include "kernels/common/repair/repair.cuh"

namespace flash_attn_ext::common {

template cudaError_t repair_forward<__nv_bfloat16>(const attention::ForwardParams&, const FlaggedRows&, cudaStream_t);
template cudaError_t repair_gradients<__nv_bfloat16>(const attention::BackwardParams&, const FlaggedRows&,
                                                     const FlaggedRows&, cudaStream_t);
template cudaError_t repair_forward<__half>(const attention::ForwardParams&, const FlaggedRows&, cudaStream_t);
template cudaError_t repair_gradients<__half>(const attention::BackwardParams&, const FlaggedRows&, const FlaggedRows&,
                                              cudaStream_t);
template cudaError_t repair_forward<float>(const attention::ForwardParams&, const FlaggedRows&, cudaStream_t);
template cudaError_t repair_gradients<float>(const attention::BackwardParams&, const FlaggedRows&, const FlaggedRows&,
                                             cudaStream_t);

}  // namespace flash_attn_ext::common
