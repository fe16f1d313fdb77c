// Sums of dS of each band of diagonals (schedule/diagonal_bands.h): which CTA computes which, and the kernel that makes
// the gradient of the bias of them.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/division.h"
#include "kernels/epilogue/store_dbias.cuh"
#include "kernels/schedule/diagonal_bands.h"

namespace flash_attn_ext::sm80 {

// What a CTA computes.
struct BandPlace {
  int split;
  int head;  // of the bias
  int band;

  __device__ __forceinline__ int64_t index(const DiagonalBands& bands) const {
    return (int64_t{split} * bands.heads + head) * bands.count() + band;
  }
};
__device__ __forceinline__ BandPlace band_place(const DiagonalBands& bands, int cta) {
  const int ctas = bands.splits * bands.heads;
  const int rest = cta % ctas;
  return {rest / bands.heads, rest % bands.heads, bands.band(cta / ctas)};
}

struct BandSums {
  attention::BackwardParams p;
  DiagonalBands bands;
  float* band_sums;  // of each split, head and band, in the order of BandPlace::index()
};

inline constexpr int kCombineThreads = 128;

// One thread for each diagonal of a head of the bias.
template <class Element>
__global__ void __launch_bounds__(kCombineThreads) combine_bands_kernel(const __grid_constant__ BandSums params) {
  const DiagonalBands& bands = params.bands;
  const attention::SequenceTable& lengths = params.p.sequences;
  const int64_t diagonals = lengths.max_seqlen_q + lengths.max_seqlen_k - 1;
  const int64_t index = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t head = index / diagonals;
  if (head >= bands.heads) return;
  const int64_t from_zero = index % diagonals + (bands.query_blocks * int64_t{bands.tile} - lengths.max_seqlen_q);
  // The diagonal lies this far from the first diagonal of the lower one of its bands' blocks.
  const int64_t place = from_zero + 1 - bands.tile;
  const int64_t lower = place >= 0 ? place / bands.tile : -1;
  const int64_t within = place - lower * bands.tile;
  float sum = 0.0f;
  for (int split = 0; split < bands.splits; ++split) {
    const float* of_head =
        params.band_sums + (int64_t{split} * bands.heads + head) * bands.count() * bands.sums_of_cta();
    if (lower >= 0) sum += of_head[lower * bands.sums_of_cta() + within + bands.tile - 1];
    if (lower + 1 < bands.count() && within > 0) sum += of_head[(lower + 1) * bands.sums_of_cta() + within - 1];
  }
  const attention::BiasGradient& g = params.p.dbias;
  const int64_t diagonal = index % diagonals - (lengths.max_seqlen_q - 1);
  store_dbias<Element>(g, head * g.head_stride + diagonal * g.key_stride, sum);
}

template <class Element>
cudaError_t combine_bands(const BandSums& sums, cudaStream_t stream) {
  const int64_t diagonals = sums.p.sequences.max_seqlen_q + sums.p.sequences.max_seqlen_k - 1;
  const int64_t blocks = attention::ceil_div(sums.bands.heads * diagonals, int64_t{kCombineThreads});
  combine_bands_kernel<Element><<<static_cast<unsigned>(blocks), kCombineThreads, 0, stream>>>(sums);
  return cudaGetLastError();
}

}  // namespace flash_attn_ext::sm80
