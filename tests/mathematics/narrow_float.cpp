// Conversions of the 16-bit types (kernels/cpu/rows/narrow_float.h), beside ldexp and a search for the nearest number.
#include "kernels/cpu/rows/narrow_float.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>

namespace cpu = flash_attn_ext::cpu;

namespace {

int num_wrong = 0;

void expect(bool right, const char* what, uint32_t bits) {
  if (!right && ++num_wrong < 10) std::fprintf(stderr, "%s: 0x%x\n", what, bits);
}

// A number of 1 sign bit, `exponent_bits` and 15 - exponent_bits, from its definition.
double value_of(uint16_t bits, int exponent_bits) {
  const int fraction_bits = 15 - exponent_bits, bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (bits & 0x7FFF) >> fraction_bits, fraction = bits & ((1 << fraction_bits) - 1);
  double magnitude;
  if (exponent == (1 << exponent_bits) - 1) {
    magnitude = fraction ? NAN : INFINITY;
  } else if (exponent == 0) {
    magnitude = std::ldexp(fraction, 1 - bias - fraction_bits);
  } else {
    magnitude = std::ldexp((1 << fraction_bits) + fraction, exponent - bias - fraction_bits);
  }
  return bits & 0x8000 ? -magnitude : magnitude;
}

// The nearest number, with ties to an even last bit. From halfway past the largest number on, it is infinity.
uint16_t nearest(float value, int exponent_bits) {
  const uint16_t infinity = static_cast<uint16_t>(((1 << exponent_bits) - 1) << (15 - exponent_bits));
  const double magnitude = std::fabs(double{value});
  uint16_t low = 0, high = infinity;  // value_of(low) <= magnitude, and high is past it
  while (high - low > 1) {
    const uint16_t middle = static_cast<uint16_t>((low + high) / 2);
    (value_of(middle, exponent_bits) <= magnitude ? low : high) = middle;
  }
  const double next = high == infinity ? 2 * value_of(low, exponent_bits) - value_of(low - 1, exponent_bits)
                                       : value_of(high, exponent_bits);
  const double below = magnitude - value_of(low, exponent_bits), above = next - magnitude;
  const uint16_t result = below < above || (below == above && low % 2 == 0) ? low : high;
  return result | (std::signbit(value) ? 0x8000 : 0);
}

void check_from_float(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) {
    expect(std::isnan(value_of(cpu::float16_from_float(value), 5)), "float16 of NaN", bits);
    expect(std::isnan(value_of(cpu::bfloat16_from_float(value), 8)), "bfloat16 of NaN", bits);
  } else {
    expect(cpu::float16_from_float(value) == nearest(value, 5), "float16 from float", bits);
    expect(cpu::bfloat16_from_float(value) == nearest(value, 8), "bfloat16 from float", bits);
  }
}

void check_to_float(uint16_t bits, float converted, int exponent_bits) {
  const double value = value_of(bits, exponent_bits);
  const bool same_nan = std::isnan(value) && std::isnan(converted);
  expect(same_nan || (converted == value && std::signbit(converted) == std::signbit(value)), "to float", bits);
}

}  // namespace

int main() {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto narrow = static_cast<uint16_t>(bits);
    check_to_float(narrow, cpu::float16_to_float(narrow), 5);
    check_to_float(narrow, cpu::bfloat16_to_float(narrow), 8);
    // Each number of float16, the middle to the next, and the floats beside these.
    for (const uint32_t offset : {0u, 1u, 0xFFFu, 0x1000u, 0x1001u, 0x1FFFu}) {
      check_from_float(std::bit_cast<float>(std::bit_cast<uint32_t>(cpu::float16_to_float(narrow)) + offset));
    }
    for (const uint32_t low : {0x7FFFu, 0x8000u, 0x8001u}) check_from_float(std::bit_cast<float>(bits << 16 | low));
  }
  std::mt19937 random(1);
  for (int i = 0; i < 200000; ++i) check_from_float(std::bit_cast<float>(static_cast<uint32_t>(random())));
  return num_wrong != 0;
}
