// Augmented columns (tile/sm90/augmented_columns.h): the rows and factors that a CTA computes, multiplied here as a
// wgmma step multiplies them.
#include "tile/sm90/augmented_columns.h"

namespace {

using namespace flash_attn_ext;

template <class Element>
float half_of(uint32_t packed, int half) {
  Element element;
  element.bits = static_cast<uint16_t>(packed >> 16 * half);
  return static_cast<float>(element);
}

// The left operand's row, the same for all rows of the step: PTX ISA, wgmma's A in registers.
template <class Element>
std::vector<double> factors() {
  std::vector<double> of_inner(16);
  for (unsigned lane = 0; lane < 32; ++lane) {
    threadIdx.x = lane;
    tile::ColumnFactors<Element> own;
    own.init();
    for (int part = 0; part < 4; ++part) {  // rows r and r + 8; then the same rows of inner elements from 8 on
      for (int half = 0; half < 2; ++half) {
        double& factor = of_inner[part / 2 * 8 + lane % 4 * 2 + static_cast<unsigned>(half)];
        const double found = half_of<Element>(own.a[part], half);
        if (lane >= 4 && factor != found) std::printf("lane %u has another factor\n", lane);
        factor = found;
      }
    }
  }
  return of_inner;
}

// Whether the operand in shared memory, whose rows are read once for either half of the inner elements, is the same.
template <class Element>
bool shared_factors_are_the_same() {
  const std::vector<double> expected = factors<Element>();
  tile::SharedColumnFactors<Element> shared;
  for (int row = 0; row < 8; ++row) {
    shared.init(row);
    const uint4& packed = shared.rows[row];
    const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
    for (size_t inner = 0; inner < 16; ++inner) {
      const size_t element = inner % 8;
      if (half_of<Element>(words[element / 2], element % 2) != expected[inner]) {
        std::printf("factor %zu in shared memory differs\n", inner);
        return false;
      }
    }
  }
  return true;
}

// What a step adds to the column of this row. Products are exact here.
template <class Element>
double added(const uint4& row) {
  static const std::vector<double> kFactors = factors<Element>();
  const uint32_t words[4] = {row.x, row.y, row.z, row.w};
  double sum = 0;
  for (int inner = 0; inner < 16; ++inner) {
    const int element = inner % 8;  // both halves have the same address
    sum += kFactors[static_cast<size_t>(inner)] * half_of<Element>(words[element / 2], element % 2);
  }
  return sum;
}
template <class Element>
double added(float x) {
  return added<Element>(tile::AugmentedColumns<Element, 8>::row(x));
}

bool fails(const char* what, double x, double found) {
  std::printf("%s: %.9g adds %.17g\n", what, x, found);
  return false;
}

template <class Element>
bool loses_less_than_float32_rounds() {
  std::mt19937 random(0);
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> exponent(-33, 27);
  for (int i = 0; i < 200'000; ++i) {
    const auto x = static_cast<float>(std::clamp(normal(random), -1.9, 1.9) * std::exp2(exponent(random)));
    const double found = added<Element>(x);
    const double allowed = std::max(std::fabs(double{x}) * 0x1p-24, 0x1p-36);
    if (!(std::fabs(found - x) <= allowed)) return fails("more is lost", x, found);
  }
  return added<Element>(0.0f) == 0 || fails("not 0", 0, added<Element>(0.0f));
}

template <class Element>
bool adds_nan_for(float x) {
  return std::isnan(added<Element>(x)) || fails("no NaN", x, added<Element>(x));
}

template <class Element>
bool is_right() {
  const double hidden = added<Element>(tile::AugmentedColumns<Element, 8>::hidden_row());
  return shared_factors_are_the_same<Element>() && loses_less_than_float32_rounds<Element>() &&
         adds_nan_for<Element>(INFINITY) && adds_nan_for<Element>(-INFINITY) && adds_nan_for<Element>(NAN) &&
         (hidden == -INFINITY || fails("a hidden row", -INFINITY, hidden));
}

// A NaN makes the rows be recomputed; otherwise they would be wrong.
bool beyond_float16_adds_nan() {
  for (const float x : {0x1p28f, -3e9f, 1e30f}) {
    if (!adds_nan_for<device::Float16>(x)) return false;
    if (!std::isfinite(added<device::Bfloat16>(x))) return fails("not finite", x, added<device::Bfloat16>(x));
  }
  return true;
}

}  // namespace

int main() { return is_right<device::Bfloat16>() && is_right<device::Float16>() && beyond_float16_adds_nan() ? 0 : 1; }
