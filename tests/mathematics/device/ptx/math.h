// 16-bit elements, and how csrc/ptx/math.h packs two of them.
#pragma once

namespace device {

// A sign, an exponent and a mantissa of kMantissa bits. Rounds to nearest even, as CUDA's 16-bit types do.
template <int kMantissa>
struct Element {
  static constexpr int kBias = (1 << (14 - kMantissa)) - 1;

  uint16_t bits = 0;

  Element() = default;
  explicit Element(float x) : bits(static_cast<uint16_t>((std::signbit(x) ? 0x8000 : 0) | magnitude(std::fabs(x)))) {}

  explicit operator float() const {
    const int exponent = (bits & 0x7FFF) >> kMantissa;
    const int mantissa = bits & ((1 << kMantissa) - 1);
    const double sign = bits & 0x8000 ? -1 : 1;
    if (exponent == 2 * kBias + 1) return static_cast<float>(mantissa == 0 ? sign * INFINITY : NAN);
    const int whole = exponent == 0 ? mantissa : mantissa + (1 << kMantissa);
    return static_cast<float>(sign * std::ldexp(whole, (exponent == 0 ? 1 : exponent) - kBias - kMantissa));
  }

 private:
  static constexpr int kInfinity = (2 * kBias + 1) << kMantissa;

  static int magnitude(double x) {
    if (std::isnan(x)) return kInfinity + 1;
    if (std::isinf(x)) return kInfinity;
    if (x == 0) return 0;
    const int exponent = std::max(std::ilogb(x), 1 - kBias);
    // A mantissa that rounding carries beyond its bits increments the exponent; the last exponent is that of infinity.
    const auto whole = static_cast<int64_t>(std::nearbyint(std::ldexp(x, kMantissa - exponent)));
    const int64_t rounded = (int64_t{exponent + kBias - 1} << kMantissa) + whole;
    return static_cast<int>(std::min<int64_t>(rounded, kInfinity));
  }
};
using Bfloat16 = Element<7>;
using Float16 = Element<10>;

}  // namespace device

namespace flash_attn_ext::ptx {

template <class Element>
uint32_t pack(float low, float high, Element) {
  return Element(low).bits | uint32_t{Element(high).bits} << 16;
}

}  // namespace flash_attn_ext::ptx
