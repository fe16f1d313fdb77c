// Every form of the microkernel beside sums in a wider type: odd sizes, gaps between rows, NaN and infinity, and bits
// that do not depend on the size of a tile. The source is included, so that all lengths of vectors run on any CPU.
#include "kernels/cpu/gemm/microkernel.cpp"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

#include "kernels/cpu/gemm/tile_gemm.h"

namespace {

using namespace flash_attn_ext;
using cpu::Accumulate;
using cpu::Block;
using cpu::GemmCall;
using cpu::GemmShape;

constexpr int64_t kLargest = 70, kGap = 3, kStride = kLargest + kGap;

int num_wrong = 0;

template <class Real>
class Matrix {
 public:
  // Gaps hold NaN, which would reach the result if they were read, and must still be there if it was written.
  explicit Matrix(int seed) : elements_(kLargest * kStride, std::numeric_limits<Real>::quiet_NaN()) {
    std::mt19937 random(seed);
    std::normal_distribution<Real> normal;
    for (int64_t i = 0; i < kLargest; ++i) {
      for (int64_t j = 0; j < kLargest; ++j) at(i, j) = normal(random);
    }
  }
  // What is outside rows x columns becomes NaN.
  Matrix cut(int64_t rows, int64_t columns) const {
    Matrix result = *this;
    for (int64_t i = 0; i < kLargest; ++i) {
      for (int64_t j = 0; j < kLargest; ++j) {
        if (i >= rows || j >= columns) result.at(i, j) = std::numeric_limits<Real>::quiet_NaN();
      }
    }
    return result;
  }
  Real& at(int64_t i, int64_t j) { return elements_[i * kStride + j]; }
  Real at(int64_t i, int64_t j) const { return elements_[i * kStride + j]; }
  Block<Real> block() { return {elements_.data(), kStride}; }
  Block<const Real> block() const { return {elements_.data(), kStride}; }

 private:
  std::vector<Real> elements_;
};

bool same_bits(const auto& a, const auto& b) { return std::memcmp(&a, &b, sizeof a) == 0; }

void expect(bool right, const char* what, const char* form, const GemmShape& shape) {
  if (right) return;
  ++num_wrong;
  std::fprintf(stderr, "%s, %s: m %d, n %d, k %d\n", form, what, int(shape.m), int(shape.n), int(shape.k));
}

// A way to compute c (+)= a . b.
template <class Real>
struct Form {
  const char* name;
  int64_t largest_k;
  void (*run)(const GemmShape& shape, Block<const Real> a, Block<const Real> b, Block<Real> c, Accumulate mode);

  Matrix<Real> operator()(const GemmShape& shape, const Matrix<Real>& a, const Matrix<Real>& b, const Matrix<Real>& c,
                          Accumulate mode) const {
    const Matrix<Real> left = a.cut(shape.m, shape.k), right = b.cut(shape.k, shape.n);
    Matrix<Real> result = c;
    run(shape, left.block(), right.block(), result.block(), mode);
    return result;
  }
};

template <class Real, void (*gemm)(const GemmCall<Real, Real>&)>
void run_call(const GemmShape& s, Block<const Real> a, Block<const Real> b, Block<Real> c, Accumulate mode) {
  gemm({s.m, s.n, s.k, a.data, a.stride, b.data, b.stride, c.data, c.stride, mode == Accumulate::kYes});
}

template <class Real>
struct Tests {
  const Matrix<Real> a{1}, b{2}, c{3};

  void values(const Form<Real>& form, const GemmShape& shape) const {
    using Wide = std::conditional_t<std::is_same_v<Real, float>, double, long double>;
    const Matrix<Real> stored = form(shape, a, b, c, Accumulate::kNo), added = form(shape, a, b, c, Accumulate::kYes);
    bool close = true, kept = true;
    for (int64_t i = 0; i < kLargest; ++i) {
      for (int64_t j = 0; j < kLargest; ++j) {
        if (i >= shape.m || j >= shape.n) {
          kept = kept && same_bits(stored.at(i, j), c.at(i, j)) && same_bits(added.at(i, j), c.at(i, j));
          continue;
        }
        Wide sum = 0, magnitude = std::fabs(c.at(i, j));
        for (int64_t t = 0; t < shape.k; ++t) {
          const Wide term = Wide(a.at(i, t)) * Wide(b.at(t, j));
          sum += term;
          magnitude += std::fabs(term);
        }
        const Wide bound = Wide(36) * std::numeric_limits<Real>::epsilon() * magnitude;  // 32 terms and 3 short sums
        close =
            close && std::fabs(stored.at(i, j) - sum) <= bound && std::fabs(added.at(i, j) - sum - c.at(i, j)) <= bound;
      }
    }
    expect(close, "too far from the definition", form.name, shape);
    expect(kept, "writes beside c", form.name, shape);
  }

  // An element has the same bits in a tile of any size.
  void bits(const Form<Real>& form, const GemmShape& shape) const {
    const Matrix<Real> whole = form({kLargest, kLargest, shape.k}, a, b, c, Accumulate::kYes);
    const Matrix<Real> some = form(shape, a, b, c, Accumulate::kYes);
    bool same = true;
    for (int64_t i = 0; i < shape.m; ++i) {
      for (int64_t j = 0; j < shape.n; ++j) same = same && same_bits(whole.at(i, j), some.at(i, j));
    }
    expect(same, "other bits than in a larger tile", form.name, shape);
  }

  // NaN in a row of a, and infinity in a column of b, reach this row and this column, and nothing else.
  void non_finite(const Form<Real>& form, const GemmShape& shape) const {
    const int64_t row = shape.m / 2, column = shape.n - 1, term = shape.k - 1;
    Matrix<Real> left = a, right = b;
    left.at(row, term) = std::numeric_limits<Real>::quiet_NaN();
    right.at(term, column) = std::numeric_limits<Real>::infinity();
    const Matrix<Real> finite = form(shape, a, b, c, Accumulate::kYes);
    const Matrix<Real> found = form(shape, left, right, c, Accumulate::kYes);
    bool right_everywhere = true;
    for (int64_t i = 0; i < shape.m; ++i) {
      for (int64_t j = 0; j < shape.n; ++j) {
        const Real value = found.at(i, j);
        const bool as_expected = i == row      ? std::isnan(value)
                                 : j == column ? std::isinf(value) && std::signbit(value) == std::signbit(a.at(i, term))
                                               : same_bits(value, finite.at(i, j));
        right_everywhere = right_everywhere && as_expected;
      }
    }
    expect(right_everywhere, "NaN or infinity in the wrong place", form.name, shape);
  }

  void run(const Form<Real>& form, bool any_size_has_the_same_bits) const {
    for (int64_t m = 1; m <= kLargest; m += 1 + m / 12) {
      for (int64_t n = 1; n <= kLargest; n += 2 + m % 5) {
        const GemmShape shape = {m, n, 1 + (7 * m + 13 * n) % form.largest_k};
        values(form, shape);
        non_finite(form, shape);
        if (any_size_has_the_same_bits) bits(form, shape);
      }
    }
    for (int64_t k = 1; k <= form.largest_k; ++k) values(form, {13, 37, k});
  }

  void run_all() const {
    constexpr int64_t kTerms = cpu::kMicrokernelTerms;
#if defined(__x86_64__)  // an emulator of another CPU would take minutes
    run({"64 bytes", kTerms, run_call<Real, cpu::multiply_tile<cpu::Registers<Real, 64, 4>>>}, true);
    run({"32 bytes", kTerms, run_call<Real, cpu::multiply_tile<cpu::Registers<Real, 32, 6>>>}, true);
    run({"16 bytes, 6 rows", kTerms, run_call<Real, cpu::multiply_tile<cpu::Registers<Real, 16, 6>>>}, true);
    run({"16 bytes, 4 rows", kTerms, run_call<Real, cpu::multiply_tile<cpu::Registers<Real, 16, 4>>>}, true);
#endif
    run({"this CPU's", kTerms, run_call<Real, cpu::multiply_in_registers>}, true);
    run({"multiply", kLargest, cpu::multiply}, false);  // few rows have an order of their own
  }
};

}  // namespace

int main() {
  Tests<float>().run_all();
  Tests<double>().run_all();
  return num_wrong != 0;
}
