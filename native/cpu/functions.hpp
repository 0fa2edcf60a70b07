// Functions of vectors `Lanes`.  Internal linkage: what is compiled for these instructions must not be
// linked into other files.

#pragma once

#include <cstdint>
#include <cstring>

namespace lmcore::cpu {
namespace {

// e^x to two units in the last place, also where it is 0 or infinite; NaN stays NaN.
inline Lanes::Vector exponential(Lanes::Vector x) {
  x = Lanes::at_most(Lanes::at_least(x, Lanes::all(-104.0F)), Lanes::all(104.0F));
  const Lanes::Vector power = Lanes::rounded(Lanes::multiply(x, Lanes::all(1.44269504F)));
  // x - power * ln 2, whose digits are in two constants.
  Lanes::Vector rest = Lanes::multiply_add(power, Lanes::all(-0.693359375F), x);
  rest = Lanes::multiply_add(power, Lanes::all(2.12194440e-4F), rest);
  // The polynomial of Cephes' expf.
  Lanes::Vector sum = Lanes::all(1.9875691500e-4F);
  constexpr float kFactors[] = {1.3981999507e-3F, 8.3334519073e-3F, 4.1665795894e-2F,
                                1.6666665459e-1F, 5.0000001201e-1F};
  for (const float factor : kFactors) {
    sum = Lanes::multiply_add(sum, rest, Lanes::all(factor));
  }
  sum = Lanes::multiply_add(sum, Lanes::multiply(rest, rest), rest);
  return Lanes::scaled_by_power_of_2(Lanes::add(sum, Lanes::all(1.0F)), power);
}

// x / (1 + e^(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3): the tanh form of GELU.
inline Lanes::Vector gelu(Lanes::Vector x) {
  const Lanes::Vector cube = Lanes::multiply(Lanes::multiply(x, x), x);
  const Lanes::Vector sum = Lanes::multiply_add(cube, Lanes::all(0.044715F), x);
  const Lanes::Vector power = Lanes::multiply(sum, Lanes::all(-1.5957691216F));
  return Lanes::divide(x, Lanes::add(exponential(power), Lanes::all(1.0F)));
}

inline float to_float(float value) { return value; }

inline float to_float(std::uint16_t value) {
  const std::uint32_t bits = static_cast<std::uint32_t>(value) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

inline void narrow(float value, float *to) { *to = value; }
inline void narrow(float value, std::uint16_t *to) { *to = to_bfloat16(value); }

}  // namespace
}  // namespace lmcore::cpu
