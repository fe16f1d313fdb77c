// VisibleColumns against brute force: every element of each lane's rows, for visible ranges of all kinds.
#include "kernels/score/visible_columns.cuh"

#include <cstdio>
#include <random>

namespace {

using flash_attn_ext::VisibleColumns;
using flash_attn_ext::attention::Band;

template <int kThreadRows, int kColumnTiles>
bool agrees(const Band& band) {
  for (int lane = 0; lane < 32; ++lane) {
    const int first_row = lane / 4;
    const int first_column = lane % 4 * 2;
    const VisibleColumns<kThreadRows, kColumnTiles> columns(band, first_row, first_column);
    for (int r = 0; r < kThreadRows; ++r) {
      const int row = first_row + 8 * r;
      const auto visible = columns.of_row(r);
      for (int j = 0; j < kColumnTiles; ++j) {
        for (int e = 0; e < 2; ++e) {
          const int column = first_column + 8 * j + e;
          const bool expected = column >= band.first_column(row) && column < band.end_column(row);
          if (visible.is_visible(j, e) == expected) continue;
          std::printf("%d thread rows, %d column tiles, band {%d, %d, %d}: row %d, column %d is %svisible\n",
                      kThreadRows, kColumnTiles, band.begin, band.end, band.length, row, column, expected ? "" : "in");
          return false;
        }
      }
    }
  }
  return true;
}

template <int kThreadRows, int... kColumnTiles>
bool all_agree(const Band& band) {
  return (agrees<kThreadRows, kColumnTiles>(band) && ...);
}

}  // namespace

int main() {
  constexpr int kFar = 1 << 20;  // where Visibility saturates
  std::mt19937 random(7);
  std::uniform_int_distribution<int> near(-90, 300);
  for (int i = 0; i < 3000; ++i) {
    const Band band = {i % 5 == 0 ? -kFar : near(random), i % 7 == 0 ? kFar : near(random),
                       i % 3 == 0 ? kFar : near(random)};
    if (!all_agree<2, 1, 2, 4, 8, 13, 14, 16, 22, 27, 32>(band)) return 1;
    if (!all_agree<4, 2, 4, 8, 11, 12, 16, 32>(band)) return 1;
  }
  return 0;
}
