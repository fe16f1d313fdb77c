// The GEMMs of the two-pass backward, whose scores were materialised (MaterialisedScores): C = factor * A^T B, summed
// over the rows n of both. Where the rows m of C are queries, dQ = scale * dS K: A is dS^T (keys x queries) and B is K,
// for each query head. Where they are keys, dV = P^T dO or dK = scale * dS^T Q: A is P or dS (queries x keys), summed
// over the query heads of a KV group.
//
// Grid: one CTA per (pair, its query head for dQ, tile of kTile.rows rows m of C, slice of columns), in each head
// longest sums first. Each warp owns 64 rows and an equal share of the columns, and reads both operands from shared
// memory with transposing loads. The mainloop iterates over the tiles that the CTA's rows see, n ascending, one query
// head after the other. No other CTA writes the same rows, so sums have one fixed order. Groups of 32 columns of A that
// a row n does not see were never written, and are zero-padded here. Split-KV, for few queries that see many keys:
// blockIdx.y is the split of the keys whose partial dQ the CTA writes (p.dq_partials). Shared memory: a pipeline of
// kTile.stages stages, each with kTile.step rows of A and B. All threads issue copies, and there is one barrier per
// step.
#pragma once

#include "kernels/config/sm80.h"
#include "kernels/config/sm80_backward.h"
#include "kernels/epilogue/store_rows.cuh"
#include "kernels/schedule/block.cuh"
#include "kernels/schedule/head_tiles.h"
#include "kernels/sm80/backward/materialised_scores.cuh"
#include "kernels/sm80/launch.cuh"
#include "kernels/sm80/sm80_kernels.h"
#include "ptx/cp_async.h"
#include "tile/sm80/gemm_transposed.h"

namespace flash_attn_ext::sm80 {

struct GemmOperands {
  Rows rows;                    // of C
  const void* left;             // A: the p or ds of BackwardParams::materialised
  attention::MatrixView right;  // B: its rows are 16-byte aligned and contiguous
  attention::MatrixView out;    // C
  int64_t columns;              // of right and out
  float factor;
};

struct BackwardGemmParams {
  BackwardParams p;
  GemmOperands operands;
};

// The work tile of a CTA.
template <class Element>
struct GemmWorkTile {
  attention::Sequence sequence;
  int64_t first_row;     // m of the CTA's first row
  int columns;           // of C, counted from the CTA's first column
  const Element* left;   // row 0 of the head's A, at column first_row
  const Element* right;  // row 0 of the head's B, at the CTA's first column
  void* out;             // row 0 of C at the CTA's first column: Element, or float where the CTA computes a partial dQ
};

template <class ElementType, int kHeadDim>
struct BackwardGemmKernel {
  using Element = ElementType;
  static constexpr GemmTile kTile = gemm_tile(sizeof(ElementType), kHeadDim);
  static constexpr int kThreads = kTile.row_warps * kTile.column_warps * kWarpSize;
  static constexpr int kRowsPerWarp = kTile.rows / kTile.row_warps;
  static_assert(kMaterialisedRows % kTile.step == 0);

  struct Stage {
    tile::SharedTile<Element, kTile.step, kTile.rows> left;
    tile::SharedTile<Element, kTile.step, kTile.columns> right;
  };
  struct Shared {
    Stage stages[kTile.stages];
  };
  using Result = tile::SharedColumns<decltype(Stage::right), kRowsPerWarp / 16, kTile.column_warps>;

  // What a zero in A does to a NaN or infinity in B: it makes a NaN, as tensor cores do, or hides it.
  enum class Zeros { kMultiply, kHide };

  // What is loaded next.
  struct Position {
    const Element* left;  // as in GemmWorkTile, for the current head
    const Element* right;
    int heads_left;
    int tile;
  };

  const BackwardParams& p;
  const GemmOperands& operands;
  Shared& shared;
  GemmWorkTile<Element> work_tile;
  TileRange tiles;  // of rows n; in full tiles, all of the CTA's columns of A were written
  Result result;

  __device__ __forceinline__ void run() {
    find_tiles();
    stream<Zeros::kMultiply>();
    // A NaN may be 0 times a NaN or infinity that the row does not attend to. The second run hides those.
    if (__syncthreads_or(result.has_nan())) stream<Zeros::kHide>();
    store();
  }

 private:
  __device__ __forceinline__ bool is_dq() const { return operands.rows == Rows::kQueries; }
  // Whether CTAs share the keys of dQ's rows (split-KV).
  __device__ __forceinline__ bool is_partial() const { return is_dq() && p.dq_partials.present(); }
  __device__ __forceinline__ int64_t num_rows() const {
    return is_dq() ? work_tile.sequence.num_queries : work_tile.sequence.num_keys;
  }
  __device__ __forceinline__ int64_t inner_length() const {
    return is_dq() ? work_tile.sequence.num_keys : work_tile.sequence.num_queries;
  }
  // The rows n that row m of C sees.
  __device__ __forceinline__ attention::Interval inner_of(int64_t m) const {
    return is_dq() ? p.visibility.keys_of(m, work_tile.sequence) : p.visibility.queries_of(m, work_tile.sequence);
  }
  __device__ __forceinline__ int num_heads() const { return is_dq() ? 1 : static_cast<int>(p.queries_per_key_head()); }

  __device__ __forceinline__ void find_tiles() {
    const int64_t end_row = min(work_tile.first_row + kTile.rows, num_rows());
    tiles = tile_range<kTile.step>(inner_of(work_tile.first_row), inner_of(end_row - 1));
    if (end_row < work_tile.first_row + kTile.rows) tiles.full_end = tiles.full_begin;
    if (is_partial()) tiles = tiles.split(blockIdx.y, p.dq_partials.count);
  }

  // Issues the copies of a tile whose rows are `stride` elements apart. bytes(row, column) of each 16-byte chunk are
  // valid, and the rest is zero-padded. A thread keeps its place in the swizzle, and steps from one group of columns to
  // the next and down the rows.
  template <int kUnrolled, class Tile, class BytesOf>
  __device__ __forceinline__ static void copy_async(Tile& tile, const Element* data, int64_t stride, BytesOf&& bytes) {
    constexpr int kChunks = Tile::kGroup / Tile::kChunk;
    constexpr int kRowStep = kThreads / kChunks;
    static_assert(kRowStep % 8 == 0 && Tile::kRows % kRowStep == 0);
    const int first_row = static_cast<int>(threadIdx.x) / kChunks;
    const int first_column = static_cast<int>(threadIdx.x) % kChunks * Tile::kChunk;
    const Element* source = data + first_row * stride + first_column;
    const uint32_t target = tile.address(first_row, first_column);
#pragma unroll kUnrolled
    for (int row = 0; row < Tile::kRows; row += kRowStep) {
#pragma unroll
      for (int column = 0; column < Tile::kColumns; column += Tile::kGroup) {
        ptx::copy_async_16(target + (row * Tile::kColumns + column) * sizeof(Element), source + column,
                           bytes(first_row + row, first_column + column));
      }
      source += kRowStep * stride;
    }
  }

  __device__ __forceinline__ void load_next(Stage& stage, Position& next) const {
    if (next.heads_left > 0) {
      const int64_t first = int64_t{next.tile} * kTile.step;
      const Element* left = next.left + first * p.materialised.columns;
      const auto everything = [](int, int) { return 16; };
      if (tiles.full(next.tile)) {
        copy_async<kTile.step>(stage.left, left, p.materialised.columns, everything);
      } else {
        const WrittenColumns written(p, work_tile.sequence, is_dq() ? Rows::kKeys : Rows::kQueries, first,
                                     work_tile.first_row);
        copy_async<1>(stage.left, left, p.materialised.columns,
                      [&](int row, int column) { return row < written.num_rows && written.has(column) ? 16 : 0; });
      }
      const int rows = static_cast<int>(min(inner_length() - first, int64_t{kTile.step}));
      const Element* right = next.right + first * operands.right.row_stride;
      if (rows == kTile.step && work_tile.columns >= kTile.columns) {
        copy_async<kTile.step>(stage.right, right, operands.right.row_stride, everything);
      } else {
        copy_async<1>(stage.right, right, operands.right.row_stride, [&](int row, int column) {
          constexpr int kChunk = decltype(stage.right)::kChunk;
          return row < rows ? min(max(work_tile.columns - column, 0), kChunk) * static_cast<int>(sizeof(Element)) : 0;
        });
      }
      if (++next.tile == tiles.end) {
        next.tile = tiles.begin;
        next.left += p.materialised.rows * p.materialised.columns;
        next.right += operands.right.head_stride;
        --next.heads_left;
      }
    }
    ptx::commit_copies();  // at the end an empty group, so that wait_copies can always count stages
  }

  __device__ __forceinline__ int first_warp_row() const { return tile::warp() / kTile.column_warps * kRowsPerWarp; }
  __device__ __forceinline__ int warp_column() const { return tile::warp() % kTile.column_warps; }

  template <Zeros kZeros>
  __device__ __forceinline__ void stream() {
    result.clear();
    Position next = {work_tile.left, work_tile.right, tiles.empty() ? 0 : num_heads(), tiles.begin};
    int steps = (tiles.end - tiles.begin) * next.heads_left;
#pragma unroll 1
    for (int s = 0; s < kTile.stages - 1; ++s) load_next(shared.stages[s], next);
    bool finished = false;  // every result of the warp is a NaN, which no further step changes
    int current = 0;
    for (; steps > 0; --steps) {
      ptx::wait_copies<kTile.stages - 2>();
      __syncthreads();  // this stage has arrived, and no warp reads the preceding one any more
      load_next(shared.stages[current == 0 ? kTile.stages - 1 : current - 1], next);
      const Stage& stage = shared.stages[current];
      if constexpr (kZeros == Zeros::kMultiply) {
        tile::multiply_transposed(result, stage.left, first_warp_row(), stage.right, warp_column());
      } else if (!finished) {
        tile::multiply_transposed_isolated(result, stage.left, first_warp_row(), stage.right, warp_column());
        finished = __all_sync(0xFFFFFFFFu, result.only_nan());
      }
      current = current + 1 == kTile.stages ? 0 : current + 1;
    }
    ptx::wait_copies<0>();
  }

  __device__ __forceinline__ void store() const {
    const int64_t stride = operands.out.column_stride;
#pragma unroll
    for (int r = 0; r < Result::Part::kThreadRows; ++r) {
      const int column_of_left = first_warp_row() + Result::Part::row(r);
      // The order of A's columns is at most a transposition, (j, t) -> (t, j), so the same function inverts it.
      const int64_t row = work_tile.first_row + MaterialisedScores::place<Element>(column_of_left);
      if (row >= num_rows()) continue;
      if constexpr (sizeof(Element) != sizeof(float)) {
        if (is_partial()) {
          store_sums_row(r, row);
          continue;
        }
      }
      Element* target = static_cast<Element*>(work_tile.out) + row * operands.out.row_stride;
#pragma unroll
      for (int group = 0; group < Result::kGroups; ++group) {
        const int column = Result::first_column(group, warp_column());
        store_row<Element>({target + column * stride, work_tile.columns - column, stride}, result.parts[group], r,
                           operands.factor);
      }
    }
  }

  __device__ __forceinline__ void store_sums_row(int r, int64_t row) const {
    float* target = static_cast<float*>(work_tile.out) + row * operands.out.row_stride;
#pragma unroll
    for (int group = 0; group < Result::kGroups; ++group) {
      const int column = Result::first_column(group, warp_column());
      store_row<float>({target + column, work_tile.columns - column, 1}, result.parts[group], r, 1.0f);
    }
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kTile.ctas_per_sm)
    backward_gemm_kernel(const __grid_constant__ BackwardGemmParams params, const __grid_constant__ Schedule schedule) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  using Element = typename Kernel::Element;
  const bool is_dq = params.operands.rows == Rows::kQueries;
  const BackwardParams& p = params.p;
  const Place at = schedule.place(blockIdx.x);
  const attention::Sequence sequence = p.sequences.at(at.batch);
  // Longest first: under causality later queries see more keys, and earlier keys are seen by more queries.
  const int64_t tile = is_dq ? static_cast<int>(schedule.tiles - 1 - at.tile)
                             : key_tile<Kernel::kTile.rows>(schedule, at, sequence.num_keys);
  const int64_t first_row = tile * Kernel::kTile.rows;
  if (first_row < 0 || first_row >= (is_dq ? sequence.num_queries : sequence.num_keys)) return;
  const int64_t key_head = at.key_head;
  const int64_t query_head = key_head * schedule.group + at.head_of_group;  // or the first head of the sum
  const int64_t query_row = sequence.query_begin;
  const int64_t key_row = sequence.key_begin;
  const int64_t first_column = int64_t{at.slice} * Kernel::kTile.columns;
  const attention::MatrixView& right = params.operands.right;
  const attention::MatrixView& out = params.operands.out;
  GemmWorkTile<Element> work_tile = {
      .sequence = sequence,
      .first_row = first_row,
      .columns = static_cast<int>(params.operands.columns - first_column),
      .left = static_cast<const Element*>(params.operands.left) +
              materialised_matrix(p, {sequence, query_head, key_head}) + first_row,
      .right = right.row<const Element>(sequence.batch, is_dq ? key_head : query_head, is_dq ? key_row : query_row) +
               first_column,
      .out = out.row<Element>(sequence.batch, is_dq ? query_head : key_head, is_dq ? query_row : key_row) +
             first_column * out.column_stride};
  if constexpr (sizeof(Element) == sizeof(float)) {  // operands.out has the splits already, and a branch would spill
    work_tile.out = static_cast<float*>(work_tile.out) + blockIdx.y * p.dq_partials.stride;
  } else if (is_dq && p.dq_partials.present()) {
    work_tile.out = p.dq_partials.row(blockIdx.y, sequence.batch, query_head, query_row) + first_column;
  }
  Kernel kernel = {.p = p,
                   .operands = params.operands,
                   .shared = *reinterpret_cast<typename Kernel::Shared*>(shared_memory),
                   .work_tile = work_tile};
  kernel.run();
}

inline GemmOperands gemm_operands(const BackwardParams& p, MatrixGradient gradient) {
  const float scale = static_cast<float>(p.score_mod.scale);
  switch (gradient) {
    case MatrixGradient::kDq:
      if (p.dq_partials.present())
        return {Rows::kQueries, p.materialised.ds, p.k, p.dq_partials.sums, p.head_dim_qk, 1.0f};
      return {Rows::kQueries, p.materialised.ds, p.k, p.dq, p.head_dim_qk, scale};
    case MatrixGradient::kDk:
      return {Rows::kKeys, p.materialised.ds, p.q, p.dk, p.head_dim_qk, scale};
    default:
      return {Rows::kKeys, p.materialised.p, p.dout, p.dv, p.head_dim_v, 1.0f};
  }
}

// Launches the GEMM for pairs [first_pair, first_pair + num_pairs).
template <class Element>
cudaError_t gradient_from_materialised(const BackwardParams& p, const BackwardPlan& plan, MatrixGradient gradient,
                                       cudaStream_t stream) {
  const GemmOperands operands = gemm_operands(p, gradient);
  const auto launch_with = [&](auto columns) {
    using Kernel = BackwardGemmKernel<Element, columns()>;
    const Schedule schedule = make_schedule(p, {.pairs = {p.first_pair, p.num_pairs},
                                                .rows = operands.rows,
                                                .tile_rows = Kernel::kTile.rows,
                                                .slices = num_slices(operands.columns, Kernel::kTile.columns),
                                                .splits = gradient == MatrixGradient::kDq ? plan.dq_splits : 1,
                                                .element_bytes = sizeof(Element),
                                                .l2_bytes = plan.l2_bytes});
    return launch<Kernel>(backward_gemm_kernel<Kernel>, {p, operands}, schedule, stream);
  };
  if (operands.columns <= 64) return launch_with(Int<64>{});
  if constexpr (sizeof(Element) == 2) {
    if (operands.columns > 192) return launch_with(Int<256>{});  // in slices, where there are more columns
    if (operands.columns > 128) return launch_with(Int<192>{});
    if (operands.columns <= 96) return launch_with(Int<96>{});
  }
  return launch_with(Int<128>{});
}

}  // namespace flash_attn_ext::sm80
