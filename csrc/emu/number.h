// Conversions of 16-bit and 8-bit floating-point numbers, as the device's cvt.rn instructions do them.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace interlace::emu {

inline uint16_t bfloat16_from_float(float value) {
  if (std::isnan(value)) return 0x7fff;  // the device's canonical NaN
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);  // to nearest, ties to even
}

inline float float_from_float16(uint16_t bits) {
  const float sign = bits & 0x8000 ? -1.0f : 1.0f;
  const int exponent = (bits >> 10) & 31;
  const float fraction = static_cast<float>(bits & 1023);
  if (exponent == 31) return fraction == 0 ? sign * INFINITY : NAN;
  if (exponent == 0) return sign * std::ldexp(fraction, -24);
  return sign * std::ldexp(1024.0f + fraction, exponent - 25);
}

inline uint16_t float16_from_float(float value) {
  if (std::isnan(value)) return 0x7fff;
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const float magnitude = std::fabs(value);
  if (magnitude >= 65520.0f) return sign | 0x7c00;  // half way to 2^16 and beyond round to infinity
  const int exponent = magnitude < 0x1p-14f ? -14 : std::ilogb(magnitude);  // below 2^-14: subnormal
  // to nearest, ties to even, in units of the last place; a carry runs into the exponent by itself
  const auto units = static_cast<uint16_t>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
  return sign | static_cast<uint16_t>(((exponent + 14) << 10) + units);
}

// e4m3: no infinity; all ones is NaN (OCP 8-bit floating point specification, 2023).
inline float float_from_e4m3(uint8_t bits) {
  const float sign = bits & 0x80 ? -1.0f : 1.0f;
  const int exponent = (bits >> 3) & 15;
  const int fraction = bits & 7;
  if (exponent == 15 && fraction == 7) return NAN;
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(fraction), -9);
  return sign * std::ldexp(static_cast<float>(8 + fraction), exponent - 10);
}

// Beyond the range to the largest number, as .satfinite says.
inline uint8_t e4m3_from_float(float value) {
  if (std::isnan(value)) return 0x7f;
  const uint8_t sign = std::signbit(value) ? 0x80 : 0;
  const float magnitude = std::fabs(value);
  if (magnitude >= 448.0f) return sign | 0x7e;
  const int exponent = magnitude < 0x1p-6f ? -6 : std::ilogb(magnitude);
  const auto units = static_cast<uint8_t>(std::nearbyint(std::ldexp(magnitude, 3 - exponent)));
  return sign | static_cast<uint8_t>(((exponent + 6) << 3) + units);
}

// All float16 numbers, for inner loops.
inline const float* float16_table() {
  static const float* const table = [] {
    static float numbers[1 << 16];
    for (uint32_t bits = 0; bits < 1 << 16; ++bits)
      numbers[bits] = float_from_float16(static_cast<uint16_t>(bits));
    return numbers;
  }();
  return table;
}
inline const float* e4m3_table() {
  static const float* const table = [] {
    static float numbers[1 << 8];
    for (uint32_t bits = 0; bits < 1 << 8; ++bits)
      numbers[bits] = float_from_e4m3(static_cast<uint8_t>(bits));
    return numbers;
  }();
  return table;
}

}  // namespace interlace::emu
