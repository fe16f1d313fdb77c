#include "kernels/common/repair.cuh"

namespace flash_attn_ext::common {

template cudaError_t repair_forward<__half>(const attention::ForwardParams&, const FlaggedRows&, cudaStream_t);
template cudaError_t repair_dq<__half>(const attention::BackwardParams&, const FlaggedRows&, cudaStream_t);
template cudaError_t repair_dkdv<__half>(const attention::BackwardParams&, const FlaggedRows&, cudaStream_t);

}  // namespace flash_attn_ext::common
