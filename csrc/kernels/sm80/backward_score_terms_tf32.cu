#include "kernels/sm80/backward_launch.cuh"

namespace flash_attn_ext::sm80 {

template cudaError_t backward_dbias<tile::Tf32>(const attention::BackwardParams&, cudaStream_t);
template cudaError_t backward_dalibi<tile::Tf32>(const attention::BackwardParams&, cudaStream_t);
template cudaError_t backward_delta<tile::Tf32>(const attention::BackwardParams&, cudaStream_t);

}  // namespace flash_attn_ext::sm80
