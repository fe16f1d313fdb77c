#include "kernels/common/repair.cuh"

namespace flash_attn_ext::common {

template cudaError_t repair_forward<float>(const attention::ForwardParams&, const FlaggedRows&, cudaStream_t);
template cudaError_t repair_dq<float>(const attention::BackwardParams&, const FlaggedRows&, cudaStream_t);
template cudaError_t repair_dkdv<float>(const attention::BackwardParams&, const FlaggedRows&, cudaStream_t);

}  // namespace flash_attn_ext::common
