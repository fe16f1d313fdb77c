// delta = rowsum(dout * out) - dlse, one value per query row. Work tile: one tile of rows of one head.
#include <algorithm>

#include "attention/division.h"
#include "kernels/cpu/cpu_kernels.h"
#include "kernels/cpu/gemm/operand.h"
#include "kernels/cpu/gemm/tile_gemm.h"
#include "kernels/cpu/schedule/tiles.h"
#include "kernels/cpu/schedule/work_queue.h"

namespace flash_attn_ext::cpu {
namespace {

template <class Real>
void delta_as(const attention::DeltaParams& p) {
  const int64_t tiles = attention::ceil_div(p.rows, kStationaryRows);
  run_work_tiles(p.batch * p.num_heads * tiles, [&] {
    return [&, out_rows = Scratch<Real>(kStationaryRows * p.head_dim),
            dout_rows = Scratch<Real>(kStationaryRows * p.head_dim)](int64_t work_tile) mutable {
      const int64_t head_index = work_tile / tiles;
      const int64_t begin = work_tile % tiles * kStationaryRows;
      const RowRange rows = {head_index / p.num_heads, head_index % p.num_heads, begin,
                             std::min(kStationaryRows, p.rows - begin)};
      const Block<const Real> out = load_rows<Real>({p.out, p.element, p.head_dim}, rows, out_rows.data());
      const Block<const Real> dout = load_rows<Real>({p.dout, p.element, p.head_dim}, rows, dout_rows.data());
      Real sums[kStationaryRows];
      dot_rows(rows.count, p.head_dim, out, dout, sums);
      for (int64_t i = 0; i < rows.count; ++i) {
        Real sum = sums[i];
        if (p.dlse.present()) sum -= *p.dlse.at<const Real>(rows.batch, rows.head, begin + i);
        *p.delta.at<Real>(rows.batch, rows.head, begin + i) = sum;
      }
    };
  });
}

}  // namespace

void delta(const attention::DeltaParams& params) {
  params.element == attention::ElementType::kFloat64 ? delta_as<double>(params) : delta_as<float>(params);
}

}  // namespace flash_attn_ext::cpu
